"""The suffix index against a plain restatement of its distribution, on texts of a few tokens; its bound and its file."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.suffix_index import distribution
from drafters.suffix import frequencies
from drafters.suffix.frequencies import EVERY_PROMPT_WEIGHT
from drafters.suffix.index import BYTES_PER_TOKEN, Drafts, RequestTexts, SuffixIndex, key_of

PROMPTS = [[1, 2, 3], [1, 2, 4], [5]]


def history(num_texts: int = 12, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) of rollouts over eight tokens, which repeat themselves."""
    generator = np.random.default_rng(seed)
    texts = []
    for number in range(num_texts):
        motif = generator.integers(0, 8, 4)
        noise = generator.integers(0, 8, 15)
        text = np.where(generator.random(15) < 0.6, np.resize(motif, 15), noise)
        texts.append((PROMPTS[number % len(PROMPTS)], text.tolist()))
    return texts


def learn(index: SuffixIndex, prompt: list[int], response: list[int]) -> None:
    index.add(key_of(prompt), response)
    while index.advance():
        pass


def filled(texts: list[tuple[list[int], list[int]]]) -> SuffixIndex:
    index = SuffixIndex(2**20)
    for prompt, response in texts:
        learn(index, prompt, response)
    return index


def knows(index: SuffixIndex, prompt: int) -> bool:
    return any(key_of([prompt]) in generation.scopes for generation in index._generations)


def draft_of(index: SuffixIndex, prompt: list[int], response: list[int], k: int, draws: bool) -> Drafts:
    """What the index proposes for one request."""
    requests, text = RequestTexts(1, len(prompt) + len(response) + k), np.array([[*prompt, *response]], np.int32)
    length, prompt_length = np.array([text.size]), np.array([len(prompt)])
    rows = requests.follow(["r"], text, length, prompt_length)
    return index.draft(requests, rows, k, np.array([draws]))


def plain_distribution(texts: list, prompt: list[int], response: list[int]) -> dict[int, float]:
    """The blend as frequencies.py's constants describe it, from the longest context to the shortest, counted naively."""
    own = prompt + response
    counts = {level: Counter[int]() for level in frequencies.LEVELS.tolist()}

    def count(text: list, context: list, token: int, weight: float) -> None:
        match = 0
        while match < min(frequencies.DEPTH, len(text), len(context)) and text[-1 - match] == context[-1 - match]:
            match += 1
            if text[-match] is None:
                break
        for level in counts:
            if level <= match:
                counts[level][token] += weight

    for other, text in texts:
        for place, token in enumerate(text):
            scopes = EVERY_PROMPT_WEIGHT + (other == prompt)
            count([None, *text[:place]], [None, *response], token, scopes)
    for place in range(1, len(own)):
        count(own[:place], own, own[place], frequencies.OWN_WEIGHT)
    share, found = 1.0, Counter[int]()
    for level in sorted(counts, reverse=True):
        total = sum(counts[level].values())
        if not total:
            continue
        escape = frequencies.ESCAPE * len(counts[level]) / (total + frequencies.ESCAPE * len(counts[level]))
        for token, mass in counts[level].items():
            found[token] += share * (1 - escape) * mass / total
        share *= escape
        if share < frequencies.LEAST_SHARE:
            break
    return {token: mass / sum(found.values()) for token, mass in found.items()}


@pytest.mark.parametrize("response", [[3], [0, 1, 2, 3], history()[0][1][:6], history()[5][1][:9]])
def test_the_distribution_is_the_blend_of_counts_by_context(response: list[int]) -> None:
    texts = history()
    prompt = PROMPTS[0]
    expected = plain_distribution(texts, prompt, response)
    assert distribution(draft_of(filled(texts), prompt, response, 1, True), 0, 0) == pytest.approx(expected, abs=1e-12)


def test_places_that_are_left_out_are_counted_by_those_that_are_not() -> None:
    """Of many places, one in `stride` is counted, and must weigh as much against the request's own text as all of them."""
    texts = [([number], [7, 1]) for number in range(600)]
    prompt, response = [7, 2, 7, 3], [7]
    found = distribution(draft_of(filled(texts), prompt, response, 1, True), 0, 0)
    assert found == pytest.approx(plain_distribution(texts, prompt, response), rel=0.05)


def test_tokens_are_drawn_from_the_distribution_that_is_handed_over() -> None:
    index, prompt, text = filled(history()), PROMPTS[1], [3, 3]
    drawn = Counter[int]()
    for _ in range(20_000):
        draft = draft_of(index, prompt, text, 2, True)
        drawn[int(draft.tokens[0, 0])] += 1
    laws, second = distribution(draft, 0, 0), distribution(draft, 0, 1)
    assert stats.chisquare([drawn[t] for t in laws], [20_000 * q for q in laws.values()]).pvalue > 1e-3
    # The second token follows the first one drawn, and is of the distribution after it.
    assert sum(second.values()) == pytest.approx(1.0)
    assert distribution(draft_of(index, prompt, [*text, int(draft.tokens[0, 0])], 1, True), 0, 0) == second


def test_without_draws_each_token_is_the_likeliest() -> None:
    draft = draft_of(filled(history()), PROMPTS[1], [3], 4, False)
    assert draft.nums.tolist() == [4]
    for j, token in enumerate(draft.lists()[0]):
        law = distribution(draft, 0, j)
        assert law[token] == max(law.values())


def test_requests_draft_together_what_each_drafts_alone() -> None:
    """At each step some requests end, others begin, and some have a new token."""
    rng, texts = np.random.default_rng(3), history(40, seed=3)
    together, alone = filled(texts), filled(texts)
    requests, lengths = RequestTexts(6, 40), np.full(8, 4)
    tokens = np.array([[*prompt, 0, *response][:16] for prompt, response in history(8, seed=4)], np.int32)
    prompt_lengths = np.array([len(PROMPTS[i % len(PROMPTS)]) for i in range(8)])
    for step in range(12):
        chosen = rng.permutation(8)[:5]
        names = [f"{i}/{step // 4}" if i % 2 else str(i) for i in chosen]
        lengths[chosen] += rng.random(5) < 0.5
        rows = requests.follow(names, tokens[chosen], lengths[chosen], prompt_lengths[chosen])
        draws = rng.random(5) < 0.5
        drafts = together.draft(requests, np.where(np.arange(5) == step % 5, -1, rows), 3, draws)
        for place, i in enumerate(chosen):
            if place == step % 5:
                assert drafts.nums[place] == 0
                continue
            prompt, text = tokens[i, : prompt_lengths[i]].tolist(), tokens[i, prompt_lengths[i] : lengths[i]].tolist()
            one = draft_of(alone, prompt, text, 3, bool(draws[place]))
            assert drafts.lists()[place] == one.lists()[0] and drafts.matches[place] == one.matches[0]
            for j in range(one.nums[0]):
                assert distribution(drafts, place, j) == distribution(one, 0, j)
        lengths = np.minimum(lengths, 13)


def test_nothing_is_drafted_after_what_nobody_has_written() -> None:
    assert draft_of(filled(history()), [9], [30, 31], 4, True).lists() == [[]]
    assert draft_of(SuffixIndex(2**12), [9], [8], 4, True).lists() == [[]]


def test_a_response_that_repeats_itself_is_drafted_without_history() -> None:
    draft = draft_of(SuffixIndex(2**12), [9], [4, 5, 6, 4, 5, 6, 4], 3, False)
    assert draft.lists() == [[5, 6, 4]]
    assert draft.matches[0] == 4  # tokens 6 4 5 6 4 have come before but for the first


def test_old_texts_are_forgotten_first_and_the_bound_holds() -> None:
    bound = 4_000 * BYTES_PER_TOKEN
    index, generator = SuffixIndex(bound), np.random.default_rng(1)
    texts = [generator.integers(0, 30, 100).tolist() for _ in range(200)]
    for number, text in enumerate(texts):
        learn(index, [number], text)
        assert index.num_bytes <= bound
        assert draft_of(index, [number], text[:20], 5, False).lists() == [text[20:25]]
    assert knows(index, 199) and not knows(index, 0)
    assert 1_000 <= index.num_tokens <= 4_000


def test_what_is_left_after_forgetting_is_an_index_of_the_newest_texts() -> None:
    index = SuffixIndex(1_000 * BYTES_PER_TOKEN)
    texts = history(63, seed=5)  # of 16 tokens with their separators: the last one makes room
    for prompt, response in texts[:-1]:
        learn(index, prompt, response)
    index.add(key_of(texts[-1][0]), texts[-1][1])
    held = index.num_tokens // 15
    assert held == 32, "half of the room, and the text that did not fit into the other half"
    while index.advance():
        pass
    for prompt, response in texts[:9]:
        found = distribution(draft_of(index, prompt, response[:8], 1, True), 0, 0)
        assert found == pytest.approx(plain_distribution(texts[-held:], prompt, response[:8]), abs=1e-12)


@pytest.mark.parametrize("room", [1_000, 10_000])
def test_pieces_of_work_do_not_grow_with_the_index(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Whatever the pieces, the index is the same in the end, and it drafts between them."""
    texts = [(prompt, response * 8) for prompt, response in history(60, seed=6)]
    plain, index = SuffixIndex(room * BYTES_PER_TOKEN), SuffixIndex(room * BYTES_PER_TOKEN)
    for prompt, response in texts:
        learn(plain, prompt, response)
    for name, size in (("PIECE", 32), ("BLOCK", 16)):
        monkeypatch.setattr(f"drafters.suffix.index.{name}", size)
    sizes = []
    for prompt, response in texts:
        index.add(key_of(prompt), response)
        for size in index._work.popleft():
            sizes.append(size)
            assert draft_of(index, [9], [4, 5, 4], 2, False).nums[0], "its own text is drafted from all the time"
    assert max(sizes) <= 16 * 5 and len(sizes) > 1_000
    for prompt, response in texts[:5]:
        found, expected = (draft_of(i, prompt, response[:9], 3, False) for i in (index, plain))
        assert found.lists() == expected.lists()
        assert [distribution(found, 0, j) for j in range(3)] == [distribution(expected, 0, j) for j in range(3)]


def test_texts_that_are_forgotten_before_they_are_learnt_are_never_learnt() -> None:
    index = SuffixIndex(100 * BYTES_PER_TOKEN)
    for number in range(20):
        index.add(key_of([number]), [number] * 9)
    while index.advance():
        pass
    known = [prompt for prompt in range(20) if knows(index, prompt)]
    assert known == list(range(20 - len(known), 20)) and index.num_tokens == 9 * len(known) <= 90


def test_an_index_goes_on_forgetting_after_it_was_loaded(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    texts = [generator.integers(0, 30, 100).tolist() for _ in range(60)]
    index, again = (SuffixIndex(2_000 * BYTES_PER_TOKEN) for _ in range(2))
    for number, text in enumerate(texts[:20]):
        learn(index, [number], text)
    index.save(tmp_path / "index.safetensors")
    again.load(tmp_path / "index.safetensors")
    for number, text in enumerate(texts[20:], 20):
        for other in (index, again):
            learn(other, [number], text)
            assert knows(other, number) and other.num_bytes <= 2_000 * BYTES_PER_TOKEN
    assert [knows(again, n) for n in range(60)] == [knows(index, n) for n in range(60)]
    assert not knows(again, 0) and again.num_tokens >= 500


def test_a_saved_index_drafts_on_as_the_first_would(tmp_path: Path) -> None:
    index, text = filled(history()), [1, 2]
    index.save(tmp_path / "index.safetensors")
    again, third = SuffixIndex(2**20, seed=7), SuffixIndex(2**20, seed=8)
    drawn = []
    for other in (again, third):
        other.load(tmp_path / "index.safetensors")
        one, two = (draft_of(i, PROMPTS[0], text, 4, False) for i in (index, other))
        assert one.lists() == two.lists() and distribution(one, 0, 0) == pytest.approx(distribution(two, 0, 0))
        drawn.append([draft_of(other, PROMPTS[0], text, 4, True).lists() for _ in range(20)])
    assert drawn[0] != drawn[1], "engines that load the same file draw the same numbers"


def test_a_file_that_does_not_fit_leaves_an_index_as_it_was(tmp_path: Path) -> None:
    filled(history()).save(tmp_path / "index.safetensors")
    small = SuffixIndex(2**9)
    learn(small, [9], [4, 5, 6])
    with pytest.raises(ValueError, match="raise max_bytes"):
        small.load(tmp_path / "index.safetensors")
    assert draft_of(small, [9], [4], 2, False).lists() == [[5, 6]]


def test_an_index_with_the_least_room_learns() -> None:
    learn(SuffixIndex(4 * BYTES_PER_TOKEN), [9], [4, 5, 6])
