"""Chunked losses against a loop over single positions, whose gradients come from autograd."""

import dataclasses

import pytest
import torch

from drafters.alignment import align
from drafters.base import SamplingParams
from drafters.losses import KL_DECAY, Teacher, acceptances, draft_loss, drafter_loss, truncate
from tests.drafters.conftest import TARGET, make_batch, make_drafter

DEPTH = 3
DRAFT_TOKENS = torch.tensor([0, 2, 3, 7, 11, 12, 20, 21, 22, 30, 38, 39])
SAMPLERS = [
    SamplingParams(1.0, 1.0, 0, "probabilistic"),
    SamplingParams(0.6, 1.0, 0, "greedy"),
    SamplingParams(1.3, 0.8, 0, "probabilistic"),
    SamplingParams(1.0, 1.0, 5, "greedy"),
    SamplingParams(0.9, 0.7, 6, "probabilistic"),
    SamplingParams(0.0, 1.0, 0, "greedy"),
    SamplingParams(0.0, 0.5, 3, "probabilistic"),
]


def processed(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Distribution [V] that the target samples from, by sorting one row."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    ranked = (logits / sampling.temperature).sort(descending=True)
    kept = torch.ones(len(logits), dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
    p = ranked.values.masked_fill(~kept, -torch.inf).softmax(0)
    before = p.cumsum(0) - p
    p = p * (before < sampling.top_p)
    return torch.zeros_like(p).scatter(0, ranked.indices, p / p.sum())


def slow_loss(hidden, draft_head, batch, target_head, sampling):
    alignment = align(batch, DEPTH)
    losses, acceptance, drawn_accepted = (
        torch.full(alignment.supervised.shape, torch.nan, dtype=torch.float64) for _ in range(3)
    )
    weights = torch.zeros_like(losses)
    for k, s in alignment.supervised.nonzero().tolist():
        start = int(alignment.start_rows[s])
        p = processed(target_head @ batch.final_hidden[start + 1 + k], sampling)[DRAFT_TOKENS]
        log_q = (draft_head @ hidden[k][s] / (sampling.temperature or 1.0)).log_softmax(0)
        drawn = (batch.token_ids[start + 2 + k] == DRAFT_TOKENS).nonzero().flatten().tolist()
        if sampling.temperature == 0 or sampling.draft_sample_method == "greedy":
            acceptance[k, s] = p[log_q.argmax()]
            trained = (p * log_q.exp()).sum()
            drawn_accepted[k, s] = float(drawn == [int(log_q.argmax())])
        else:
            trained = torch.minimum(p, log_q.exp()).sum()
            acceptance[k, s] = trained.detach()
            drawn_accepted[k, s] = min(float(log_q.detach().exp()[drawn[0]] / p[drawn[0]]), 1.0) if drawn else 0.0
        cross_entropy = -(p * log_q).sum()
        share = float(torch.exp(-KL_DECAY * trained.detach()))
        losses[k, s] = share * cross_entropy + (1 - share) * (1 - trained)
        weights[k, s] = acceptance[:k, s].nan_to_num(1.0).prod() / int(alignment.supervised[k].sum())
    per_position = torch.stack([row[row.isfinite()].mean() for row in losses])
    loss = (torch.where(alignment.supervised, losses, 0) * weights).sum() / weights.sum()
    return loss, per_position, torch.stack([acceptance, drawn_accepted])


def teacher_of(batch, target, sampling):
    return Teacher(batch, target, DRAFT_TOKENS, sampling)


def fake_hidden(batch, generator):
    num_starts = len(align(batch, DEPTH).start_rows)
    return [torch.randn(num_starts, 16, generator=generator, dtype=torch.float64) for _ in range(DEPTH)]


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_loss_acceptance_and_gradients_equal_a_slow_loop(sampling, chunk_tokens, target_weights, monkeypatch):
    batch = make_batch((3, 9, 0), (5, 6, 4), (2, 2, 0))
    generator = torch.Generator().manual_seed(1)
    draft_head = torch.randn(len(DRAFT_TOKENS), 16, generator=generator, dtype=torch.float64, requires_grad=True)
    hidden = [tensor.requires_grad_() for tensor in fake_hidden(batch, generator)]
    monkeypatch.setattr("drafters.losses.CHUNK_TOKENS", chunk_tokens)

    actual = draft_loss(hidden, draft_head, teacher_of(batch, target_weights, sampling), align(batch, DEPTH))
    expected = slow_loss(hidden, draft_head, batch, target_weights.head, sampling)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, equal_nan=True)

    inputs = [draft_head, *hidden]
    torch.testing.assert_close(
        torch.autograd.grad(3 * actual[0], inputs), torch.autograd.grad(3 * expected[0], inputs), rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_gradients_equal_finite_differences(method, target_weights, monkeypatch):
    """Of the cross-entropy with equal weights: through the mixing weight and the weights of reach, no gradient flows."""
    monkeypatch.setattr("drafters.losses.KL_DECAY", 0.0)
    monkeypatch.setattr("drafters.losses.reach_weights", lambda before: torch.ones(before.shape[1], dtype=before.dtype))
    batch = make_batch((3, 6, 0))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(len(DRAFT_TOKENS), 16, generator=generator, dtype=torch.float64, requires_grad=True)
    hidden = [tensor.requires_grad_() for tensor in fake_hidden(batch, generator)]
    teacher, alignment = teacher_of(batch, target_weights, SamplingParams(0.8, 1.0, 0, method)), align(batch, DEPTH)
    assert torch.autograd.gradcheck(
        lambda *inputs: draft_loss(inputs[1:], inputs[0], teacher, alignment)[0], (head, *hidden)
    )


def test_mass_outside_the_draft_vocabulary_is_a_rejection(target_weights, sampling):
    """A drafter that proposes exactly the target's renormalised distribution is accepted with the mass it covers."""
    batch = make_batch((2, 6, 0))
    alignment = align(batch, 1)
    teacher = teacher_of(batch, target_weights, sampling)
    p = teacher.of_draft_vocabulary(*teacher.processed_logits(alignment.target_rows(0)))
    assert (p.sum(-1) < 0.999).all()
    perfect = [batch.final_hidden[alignment.target_rows(0)]]
    *_, accepted = draft_loss(perfect, target_weights.head[DRAFT_TOKENS], teacher, alignment)
    torch.testing.assert_close(accepted[0, 0], p.sum(-1))
    outside = ~torch.isin(batch.token_ids[alignment.target_rows(0) + 1], DRAFT_TOKENS)
    assert outside.any() and (accepted[1, 0][outside] == 0).all()


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_acceptance_is_what_rejection_sampling_accepts(method, target_weights):
    """Monte Carlo of the engine's rule: draft from q (or its argmax), accept with min(1, p/q) (or p)."""
    batch = make_batch((1, 2, 0))
    alignment = align(batch, 1)
    generator = torch.Generator().manual_seed(3)
    hidden = [torch.randn(len(alignment.start_rows), 16, generator=generator, dtype=torch.float64) * 0.3]
    draft_head = torch.randn(len(DRAFT_TOKENS), 16, generator=generator, dtype=torch.float64)
    sampling = SamplingParams(1.5, 1.0, 0, method)
    batch = dataclasses.replace(batch, final_hidden=batch.final_hidden * 0.5)
    teacher = teacher_of(batch, target_weights, sampling)
    acceptance = draft_loss(hidden, draft_head, teacher, alignment)[2][0]

    p = processed(target_weights.head @ batch.final_hidden[1], sampling)[DRAFT_TOKENS]
    q = (draft_head @ hidden[0][0] / 1.5).softmax(0)
    samples = 200_000
    if method == "greedy":
        drafts, ratio = q.argmax().expand(samples), p
    else:
        drafts, ratio = torch.multinomial(q, samples, replacement=True, generator=generator), p / q
    accepted = torch.rand(samples, generator=generator) < ratio[drafts]
    # Five standard errors: a false alarm once in two million seeds.
    assert abs(accepted.double().mean() - acceptance[0, 0]) < 5 * (0.25 / samples) ** 0.5


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_whole_vocabulary_is_read_without_an_index(sampling, target_weights):
    batch = make_batch((2, 9, 0))
    rows = align(batch, 1).target_rows(0)
    everything = dataclasses.replace(
        teacher_of(batch, target_weights, sampling), draft_to_target=torch.arange(TARGET.vocab_size)
    )
    p = everything.of_draft_vocabulary(*everything.processed_logits(rows))
    torch.testing.assert_close(p.sum(-1), torch.ones(len(rows), dtype=torch.float64))
    some = teacher_of(batch, target_weights, sampling)
    indexed = some.of_draft_vocabulary(*some.processed_logits(rows))
    torch.testing.assert_close(p[:, DRAFT_TOKENS], indexed, rtol=1e-12, atol=0)
    assert torch.equal(everything.drawn_draft_ids(rows), batch.token_ids[rows + 1])
    logits, normaliser = everything.processed_logits(rows)
    before = logits.clone()
    everything.of_draft_vocabulary(logits, normaliser)
    assert torch.equal(logits, before)  # the next drafter reads them too


def with_log_probs(batch, target, sampling):
    """The batch with the log-probability of each token that an engine would tell."""
    everything = dataclasses.replace(
        teacher_of(batch, target, sampling), draft_to_target=torch.arange(TARGET.vocab_size)
    )
    rows = (batch.feature_mask & (batch.document_ids == batch.document_ids.roll(-1))).nonzero().flatten()
    p = everything.of_draft_vocabulary(*everything.processed_logits(rows))
    log_probs = torch.full(batch.token_ids.shape, torch.nan, dtype=torch.float64)
    log_probs[rows + 1] = p.gather(1, batch.token_ids[rows + 1][:, None]).log().squeeze(1)
    return dataclasses.replace(batch, log_probs=log_probs)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_log_probabilities_of_a_rollout_stand_for_the_logits_of_all_tokens(
    temperature, target_weights, monkeypatch
):
    sampling, batch = SamplingParams(temperature, 1.0, 0, "probabilistic"), make_batch((3, 9, 0), (5, 6, 4))
    drafter = make_drafter()
    whole = drafter_loss(drafter, batch, target_weights, sampling)
    gradient = torch.autograd.grad(whole[0], [*drafter.parameters()], allow_unused=True)
    known = with_log_probs(batch, target_weights, sampling)
    monkeypatch.setattr(Teacher, "processed_logits", lambda *chunk: pytest.fail("logits of all tokens"))
    quick = drafter_loss(drafter, known, target_weights, sampling)
    torch.testing.assert_close(quick, whole)
    torch.testing.assert_close(torch.autograd.grad(quick[0], [*drafter.parameters()], allow_unused=True), gradient)


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_log_probabilities_are_not_used_where_sampling_cuts_tokens_off_and_never_for_a_score(sampling, target_weights):
    batch, drafter = make_batch((3, 9, 0), (5, 6, 4)), make_drafter()
    wrong = dataclasses.replace(batch, log_probs=torch.full(batch.token_ids.shape, -1e-3, dtype=torch.float64))
    scores = [acceptances([drafter], rows, target_weights, sampling)[0].probability for rows in (batch, wrong)]
    assert torch.equal(*(score.nan_to_num() for score in scores))
    if sampling.temperature == 0 or sampling.top_k or sampling.top_p < 1:
        losses = [drafter_loss(drafter, rows, target_weights, sampling)[0] for rows in (batch, wrong)]
        assert torch.equal(*losses)


def test_a_row_without_a_log_probability_has_all_logits(target_weights):
    sampling, batch, drafter = SamplingParams(1.0, 1.0, 0, "probabilistic"), make_batch((3, 9, 0)), make_drafter()
    known = with_log_probs(batch, target_weights, sampling)
    known.log_probs[6] = torch.nan
    torch.testing.assert_close(*(drafter_loss(drafter, rows, target_weights, sampling) for rows in (batch, known)))


def test_a_head_that_is_not_trained_gets_no_gradient_and_changes_no_other(target_weights, sampling):
    batch = make_batch((3, 9, 0), (5, 6, 4))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(len(DRAFT_TOKENS), 16, generator=generator, dtype=torch.float64)
    hidden = [tensor.requires_grad_() for tensor in fake_hidden(batch, generator)]
    results = []
    for own in (head.clone().requires_grad_(), head):
        loss, *_ = draft_loss(hidden, own, teacher_of(batch, target_weights, sampling), align(batch, DEPTH))
        loss.backward()
        results.append([loss.detach(), *(tensor.grad for tensor in hidden)])
        for tensor in hidden:
            tensor.grad = None
        assert (own.grad is not None) == own.requires_grad
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in results[0][1:])


def test_truncation_keeps_ties_and_at_least_one_token():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    assert truncate(logits, SamplingParams(1.0, 1.0, 2, "")).isfinite().tolist() == [[False, True, True, True]]
    assert truncate(logits, SamplingParams(1.0, 1e-6, 0, "")).isfinite().tolist() == [[False, True, False, False]]
    assert torch.equal(truncate(logits, SamplingParams(1.0, 1.0, 0, "")), logits)


def test_no_gradients_are_computed_without_grad_mode(target_weights, sampling):
    batch = make_batch((3, 9, 0))
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(len(DRAFT_TOKENS), 16, dtype=torch.float64, requires_grad=True)
    teacher = teacher_of(batch, target_weights, sampling)
    arguments = (fake_hidden(batch, generator), head, teacher, align(batch, DEPTH))
    with torch.no_grad():
        loss, *_ = draft_loss(*arguments)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, draft_loss(*arguments)[0].detach())


def test_nothing_of_size_rows_by_vocabulary_is_kept_for_the_backward_pass(target_weights, sampling, monkeypatch):
    monkeypatch.setattr("drafters.losses.CHUNK_TOKENS", 32)
    batch = make_batch((3, 200, 0))
    batch = dataclasses.replace(batch, final_hidden=batch.final_hidden[:, :4])
    generator = torch.Generator().manual_seed(1)
    num_starts = len(align(batch, DEPTH).start_rows)
    hidden = [torch.randn(num_starts, 4, generator=generator, dtype=torch.float64) for _ in range(DEPTH)]
    head = torch.randn(len(DRAFT_TOKENS), 4, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        narrow = dataclasses.replace(target_weights, head=target_weights.head[:, :4])
        teacher = teacher_of(batch, narrow, sampling)
        draft_loss(hidden, head, teacher, align(batch, DEPTH))
    assert 0 < max(kept) < num_starts * len(DRAFT_TOKENS) < num_starts * TARGET.vocab_size
