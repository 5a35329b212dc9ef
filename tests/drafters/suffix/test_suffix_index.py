"""The suffix index against a plain restatement of its law, on texts of a few tokens; ageing, its bound and its file."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import stats

from drafters.suffix import law
from drafters.suffix.fitting import Finished, HalfLifeFit, expected_acceptances
from drafters.suffix.index import BYTES_PER_TOKEN, EVERY_PROMPT_WEIGHT, SuffixIndex, key_of

PROMPTS = [[1, 2, 3], [1, 2, 4], [5]]


def history(num_texts: int = 12, seed: int = 0) -> list[tuple[list[int], list[int], int]]:
    """(prompt, response, policy version) of rollouts over eight tokens, which repeat themselves."""
    generator = np.random.default_rng(seed)
    texts = []
    for number in range(num_texts):
        motif = generator.integers(0, 8, 4)
        noise = generator.integers(0, 8, 15)
        text = np.where(generator.random(15) < 0.6, np.resize(motif, 15), noise)
        texts.append((PROMPTS[number % len(PROMPTS)], text.tolist(), number // 4))
    return texts


def filled(texts: list[tuple[list[int], list[int], int]], half_life: float | None = None) -> SuffixIndex:
    index = SuffixIndex(2**20)
    for prompt, response, version in texts:
        index.weigh_by(version, half_life)
        index.add(key_of(prompt), response, version)
    return index


def plain_law(texts: list, prompt: list[int], response: list[int], half_life: float | None) -> dict[int, float]:
    """The blend as law.py's constants describe it, from the longest context to the shortest, counted naively."""
    own = prompt + response
    counts = {level: Counter[int]() for level in law.LEVELS.tolist()}

    def count(text: list, context: list, token: int, weight: float) -> None:
        match = 0
        while match < min(law.DEPTH, len(text), len(context)) and text[-1 - match] == context[-1 - match]:
            match += 1
            if text[-match] is None:
                break
        for level in counts:
            if level <= match:
                counts[level][token] += weight

    newest = max(version for *_, version in texts)
    for other, text, version in texts:
        age = 1.0 if half_life is None else 0.5 ** ((newest - version) / half_life)
        for place, token in enumerate(text):
            scopes = EVERY_PROMPT_WEIGHT + (other == prompt)
            count([None, *text[:place]], [None, *response], token, age * scopes)
    for place in range(1, len(own)):
        count(own[:place], own, own[place], law.OWN_WEIGHT)
    share, found = 1.0, Counter[int]()
    for level in sorted(counts, reverse=True):
        total = sum(counts[level].values())
        if not total:
            continue
        escape = law.ESCAPE * len(counts[level]) / (total + law.ESCAPE * len(counts[level]))
        for token, mass in counts[level].items():
            found[token] += share * (1 - escape) * mass / total
        share *= escape
        if share < law.LEAST_SHARE:
            break
    return {token: mass / sum(found.values()) for token, mass in found.items()}


@pytest.mark.parametrize("half_life", [None, 1.5])
@pytest.mark.parametrize("response", [[3], [0, 1, 2, 3], history()[0][1][:6], history()[5][1][:9]])
def test_law_is_the_blend_of_counts_by_context(response: list[int], half_life: float | None) -> None:
    texts = history()
    prompt = PROMPTS[0]
    draft = filled(texts, half_life).draft(key_of(prompt), np.array(prompt + response, np.int32), len(prompt), 1, True)
    found = dict(zip(draft.supports[0, : draft.sizes[0]].tolist(), draft.laws[0, : draft.sizes[0]], strict=True))
    expected = plain_law(texts, prompt, response, half_life)
    assert found == pytest.approx(expected, abs=1e-12)


def test_places_that_are_left_out_are_counted_by_those_that_are_not() -> None:
    """Of many places, one in `stride` is counted, and must weigh as much against the request's own text as all of them."""
    texts = [([number], [7, 1], 0) for number in range(600)]
    prompt, response = [7, 2, 7, 3], [7]
    draft = filled(texts).draft(key_of(prompt), np.array(prompt + response, np.int32), len(prompt), 1, True)
    found = dict(zip(draft.supports[0, : draft.sizes[0]].tolist(), draft.laws[0, : draft.sizes[0]], strict=True))
    assert found == pytest.approx(plain_law(texts, prompt, response, None), rel=0.05)


def test_tokens_are_drawn_from_the_law_that_is_handed_over() -> None:
    index, text = filled(history()), np.array([*PROMPTS[1], 3, 3], np.int32)
    drawn, laws = Counter[int](), {}
    for _ in range(20_000):
        draft = index.draft(key_of(PROMPTS[1]), text, 3, 2, True)
        drawn[int(draft.tokens[0])] += 1
        laws = dict(zip(draft.supports[0, : draft.sizes[0]].tolist(), draft.laws[0], strict=False))
    assert stats.chisquare([drawn[t] for t in laws], [20_000 * q for q in laws.values()]).pvalue > 1e-3
    # The second token follows the first one drawn, and is of the law after it.
    assert draft.laws[1, : draft.sizes[1]].sum() == pytest.approx(1.0)
    longer = np.append(text, draft.tokens[0]).astype(np.int32)
    again = index.draft(key_of(PROMPTS[1]), longer, 3, 1, True)
    np.testing.assert_array_equal(again.laws[0, : again.sizes[0]], draft.laws[1, : draft.sizes[1]])


def test_without_draws_each_token_is_the_likeliest() -> None:
    draft = filled(history()).draft(key_of(PROMPTS[1]), np.array([*PROMPTS[1], 3], np.int32), 3, 4, False)
    assert len(draft.tokens) == 4
    for token, support, probabilities, size in zip(*draft[:4], strict=True):
        assert token == support[probabilities[:size].argmax()]


def test_nothing_is_drafted_after_what_nobody_has_written() -> None:
    assert len(filled(history()).draft(key_of([9]), np.array([9, 30, 31], np.int32), 1, 4, True).tokens) == 0
    assert len(SuffixIndex(2**12).draft(key_of([9]), np.array([9, 8], np.int32), 1, 4, True).tokens) == 0


def test_a_response_that_repeats_itself_is_drafted_without_history() -> None:
    text = np.array([9, 4, 5, 6, 4, 5, 6, 4], np.int32)
    draft = SuffixIndex(2**12).draft(key_of([9]), text, 1, 3, False)
    assert draft.tokens.tolist() == [5, 6, 4]
    assert draft.match == 4  # tokens 6 4 5 6 4 have come before but for the first


def test_old_texts_are_forgotten_first_and_the_bound_holds() -> None:
    bound = 4_000 * BYTES_PER_TOKEN
    index, generator = SuffixIndex(bound), np.random.default_rng(1)
    texts = [generator.integers(0, 30, 100).tolist() for _ in range(200)]
    for number, text in enumerate(texts):
        index.add(key_of([number]), text, 0)
        assert index.num_bytes <= bound
        draft = index.draft(key_of([number]), np.array([number, *text[:20]], np.int32), 1, 5, False)
        assert draft.tokens.tolist() == text[20:25]
    assert key_of([199]) in index._segments and key_of([0]) not in index._segments
    assert 1_000 <= index.num_tokens <= 4_000


def test_faded_texts_make_room_before_older_ones_do() -> None:
    """A rollout that comes late, of an old policy, goes before what came earlier of a young one."""
    index = SuffixIndex(2_000 * BYTES_PER_TOKEN)
    generator = np.random.default_rng(2)
    index.weigh_by(11, 1.0)
    for number in range(18):
        version = 11 if number < 3 else 0
        index.add(key_of([version, number]), generator.integers(0, 30, 100).tolist(), version)
    assert all(key_of([11, number]) in index._segments for number in range(3))
    assert key_of([0, 4]) not in index._segments


def test_texts_of_a_policy_long_gone_count_nothing() -> None:
    """The weights of very old texts are rounded away, and must not make a law of nothing."""
    prompt, response, _ = history()[0]
    index, fit = filled(history(), 1.0), HalfLifeFit()
    index.weigh_by(60, 1.0)
    text = np.array([*prompt, *response[:6]], np.int32)
    with_history, alone = (
        {int(t): q for t, q in zip(draft.supports[0, : draft.sizes[0]], draft.laws[0], strict=False) if q}
        for draft in (i.draft(key_of(prompt), text, len(prompt), 1, True) for i in (index, SuffixIndex(2**12)))
    )
    assert with_history == pytest.approx(alone) and sum(alone.values()) == pytest.approx(1.0)
    index.weigh_by(60, None)
    for _ in range(120):
        fit.observe(index, Finished(prompt, response, [-1.0] * len(response), 60))
    assert fit.best(1.0) is None  # old texts are all that there is, and they fit


def test_a_saved_index_drafts_on_as_the_first_would(tmp_path: Path) -> None:
    index, text = filled(history(), 2.0), np.array([*PROMPTS[0], 1, 2], np.int32)
    index.save(tmp_path / "index.safetensors")
    again, third = SuffixIndex(2**20, seed=7), SuffixIndex(2**20, seed=8)
    drawn = []
    for other in (again, third):
        other.load(tmp_path / "index.safetensors")
        one, two = (i.draft(key_of(PROMPTS[0]), text, 3, 4, False) for i in (index, other))
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.laws[0, : one.sizes[0]], two.laws[0, : two.sizes[0]])
        drawn.append([other.draft(key_of(PROMPTS[0]), text, 3, 4, True).tokens.tolist() for _ in range(20)])
        assert other.half_life == 2.0
    assert drawn[0] != drawn[1], "engines that load the same file draw the same numbers"


def test_a_file_that_does_not_fit_leaves_an_index_as_it_was(tmp_path: Path) -> None:
    filled(history()).save(tmp_path / "index.safetensors")
    save_file({"texts": np.zeros(3, np.int32)}, tmp_path / "other.safetensors")
    small = SuffixIndex(2**8)
    small.add(key_of([9]), [4, 5, 6], 0)
    for name, message in (("index", "raise max_bytes"), ("other", "is no index of this version: it lacks half_life, ")):
        with pytest.raises(ValueError, match=message):
            small.load(tmp_path / f"{name}.safetensors")
    assert small.draft(key_of([9]), np.array([9, 4], np.int32), 1, 2, False).tokens.tolist() == [5, 6]


def test_an_index_without_room_for_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="allow at least"):
        SuffixIndex(4 * BYTES_PER_TOKEN - 1)
    SuffixIndex(4 * BYTES_PER_TOKEN).add(key_of([9]), [4, 5, 6], 0)


def rollouts_of(table: np.ndarray, num: int, seed: int) -> list[Finished]:
    """Rollouts of a policy whose next token depends on the last one alone. table [V, V]: its probabilities."""
    generator, rollouts = np.random.default_rng(seed), []
    for _ in range(num):
        tokens, log_probs = [0], [0.0]
        for _ in range(60):
            law_of = table[tokens[-1]]
            tokens.append(int(generator.choice(len(table), p=law_of)))
            log_probs.append(float(np.log(law_of[tokens[-1]])))
        rollouts.append(Finished([9], tokens, log_probs))
    return rollouts


def test_expected_acceptance_is_the_overlap_of_the_two_laws() -> None:
    table = np.random.default_rng(3).dirichlet(np.full(6, 0.5), 6)
    index = SuffixIndex(2**22)
    for rollout in rollouts_of(table, 40, seed=4):
        index.add(key_of([9]), rollout.token_ids, 0)
    fresh, overlaps = rollouts_of(table, 12, seed=5), []
    for rollout in fresh:
        text = np.array([9, *rollout.token_ids], np.int32)
        for place in range(2, len(text)):
            draft = index.draft(key_of([9]), text[:place], 1, 1, True)
            q = np.zeros(10)
            q[draft.supports[0, : draft.sizes[0]]] = draft.laws[0, : draft.sizes[0]]
            overlaps.append(np.minimum(table[text[place - 1]], q[:6]).sum())
    expected = np.concatenate([expected_acceptances(index, rollout, None) for rollout in fresh])
    assert expected.mean() == pytest.approx(np.mean(overlaps), abs=0.03)


def test_texts_of_a_policy_that_moves_age() -> None:
    tables = np.random.default_rng(6).dirichlet(np.full(6, 0.3), (6, 6))  # [version, last token, next token]
    index = SuffixIndex(2**22)
    for version, table in enumerate(tables):
        index.weigh_by(version, None)
        for rollout in rollouts_of(table, 6, seed=version):
            index.add(key_of([9]), rollout.token_ids, version)
    fit = HalfLifeFit()
    for rollout in rollouts_of(tables[-1], 10, seed=98):
        fit.observe(index, rollout)
    assert fit.best(None) is None and fit.best(8.0) == 8.0  # too few tokens to tell
    for rollout in rollouts_of(tables[-1], 60, seed=99):
        fit.observe(index, rollout)
    half_life = fit.best(None)
    assert half_life is not None and half_life <= 2
