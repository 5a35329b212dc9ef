"""Alignment against a loop over single tokens that knows nothing of masks and shifts."""

from itertools import pairwise

import pytest
import torch

from drafters.alignment import DraftBatch, align, beyond_stop, generated_before
from tests.drafters.conftest import make_batch

DEPTH = 4


def supervised_pairs(batch: DraftBatch, position: int) -> set[tuple[int, int]]:
    """(start row, target row) of a draft position, one token at a time."""
    pairs = set()
    for document in batch.document_ids.unique():
        rows = (batch.document_ids == document).nonzero().flatten().tolist()
        for index, start in enumerate(rows):
            predicted = index + 2 + position
            if predicted >= len(rows) or not batch.response_mask[rows[predicted]]:
                continue
            read = batch.response_mask[rows[index + 1] : rows[predicted] + 1].tolist()
            if (True, False) in pairwise(read):  # a turn has ended in between
                continue
            if batch.feature_mask[start] and batch.feature_mask[rows[predicted - 1]]:
                pairs.add((start, rows[predicted - 1]))
    return pairs


@pytest.mark.parametrize(
    "documents",
    [
        [(3, 9, 0)],
        [(3, 9, 0), (1, 6, 0), (4, 1, 0), (2, 2, 0)],
        [(8, 6, 5), (5, 5, 8), (2, 1, 0), (4, 8, 0)],
        [(1, 1, 0)],
    ],
)
def test_alignment_equals_a_loop_over_tokens(documents):
    batch = make_batch(*documents)
    alignment = align(batch, DEPTH)
    for position in range(DEPTH):
        starts = alignment.start_rows[alignment.supervised[position]].tolist()
        pairs = set(zip(starts, alignment.target_rows(position).tolist(), strict=True))
        assert pairs == supervised_pairs(batch, position)
        inputs = alignment.input_rows(position)[alignment.supervised[position]].tolist()
        assert inputs == [start + 1 + position for start in starts]


def test_worked_example_of_the_module():
    alignment = align(make_batch((2, 4, 0)), 2)
    assert alignment.context_rows.tolist() == [0, 1, 2, 3, 4]
    assert alignment.start_rows.tolist() == [0, 1, 2, 3]
    assert alignment.target_rows(0).tolist() == [1, 2, 3, 4]
    assert alignment.target_rows(1).tolist() == [2, 3, 4]


def test_holes_inside_a_rollout_are_no_context_no_start_and_no_target():
    batch = make_batch((2, 10, 0))
    batch.feature_mask[5] = False
    alignment = align(batch, DEPTH)
    assert 5 not in alignment.context_rows
    assert 5 not in alignment.start_rows
    for position in range(DEPTH):
        assert 5 not in alignment.target_rows(position)
        starts = alignment.start_rows[alignment.supervised[position]].tolist()
        pairs = set(zip(starts, alignment.target_rows(position).tolist(), strict=True))
        assert pairs == supervised_pairs(batch, position)


def test_documents_cover_context_and_starts_without_mixing():
    batch = make_batch((3, 9, 0), (4, 1, 0), (5, 5, 8), (2, 7, 1))
    alignment = align(batch, DEPTH)
    covered = []
    for context_span, starts_span in alignment.spans:
        context = alignment.context_rows[context_span]
        starts = alignment.start_rows[starts_span]
        assert len(batch.document_ids[torch.cat([context, starts])].unique()) == 1
        covered += starts.tolist()
    assert covered == alignment.start_rows.tolist()
    assert torch.equal(alignment.context_rows[alignment.starts_in_context], alignment.start_rows)


def test_a_batch_without_supervision_has_no_starts():
    alignment = align(make_batch((3, 1, 0), (4, 0, 0)), DEPTH)
    # The only response token is predicted from the prompt's last row but one.
    assert alignment.start_rows.tolist() == [0, 1]
    assert align(make_batch((4, 0, 0)), DEPTH).start_rows.tolist() == []


def test_a_share_of_the_starts_keeps_the_context_and_the_rollout_of_each():
    batch = make_batch((4, 8, 0), (3, 1, 0), (5, 9, 2))
    alignment, sampled = align(batch, 3), align(batch, 3, 0.3, torch.Generator().manual_seed(0))
    assert len(sampled.start_rows) == round(0.3 * len(alignment.start_rows)) > 3
    assert torch.equal(sampled.context_rows, alignment.context_rows)
    assert torch.equal(sampled.context_rows[sampled.starts_in_context], sampled.start_rows)
    of = torch.searchsorted(alignment.start_rows, sampled.start_rows)
    assert torch.equal(alignment.start_rows[of], sampled.start_rows)
    assert torch.equal(sampled.supervised, alignment.supervised[:, of])
    covered = torch.cat([sampled.starts_in_context[starts] for _, starts in sampled.spans])
    assert torch.equal(covered, sampled.starts_in_context)
    for context, starts in sampled.spans:
        inside = sampled.starts_in_context[starts]
        assert ((inside >= context.start) & (inside < context.stop)).all()
    assert len(align(batch, 3, 1e-9, torch.Generator()).start_rows) == 1


def test_starts_that_are_drawn_together_share_their_target_rows():
    batch = make_batch((4, 300, 0), (4, 300, 0))
    sampled = align(batch, 5, 0.25, torch.Generator().manual_seed(0))
    rows = torch.cat([sampled.target_rows(position) for position in range(5)])
    assert len(rows.unique()) < 1.5 * len(sampled.start_rows) < 0.4 * len(rows)
    other = align(batch, 5, 0.25, torch.Generator().manual_seed(1))
    assert not torch.equal(other.start_rows, sampled.start_rows)


def with_observed(batch: DraftBatch, *rows: int) -> DraftBatch:
    """The batch with these rows observed, as what a tool has answered between two turns."""
    batch.response_mask[list(rows)] = False
    return batch


@pytest.mark.parametrize("observed", [(5, 6), (5,), (4, 8, 9, 10), (3, 5, 7)])
def test_no_draft_goes_on_after_the_end_of_a_turn(observed):
    batch = with_observed(make_batch((3, 11, 0), (2, 5, 0)), *observed)
    alignment = align(batch, DEPTH)
    assert {*observed} < {*alignment.context_rows.tolist()}, "what a tool answered is context"
    for position in range(DEPTH):
        starts = alignment.start_rows[alignment.supervised[position]].tolist()
        targets = alignment.target_rows(position)
        assert set(zip(starts, targets.tolist(), strict=True)) == supervised_pairs(batch, position)
        assert batch.response_mask[targets + 1].all(), "no observed token is a target"


def test_each_turn_counts_its_own_tokens():
    """Two turns of three and two tokens, with two observed ones between them, and a rollout of one turn."""
    batch = with_observed(make_batch((2, 7, 0), (1, 3, 0)), 5, 6)
    turns, offsets = generated_before(batch, torch.tensor([0, 1, 2, 3, 4, 5, 6, 9, 10]))
    assert turns.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert offsets.tolist() == [-1, 0, 1, 2, -2, -1, 0, 0, 1]


def test_positions_behind_the_end_of_a_turn():
    batch = with_observed(make_batch((2, 7, 0)), 5, 6)
    batch.token_ids[4] = 2  # the end-of-sequence token ends the first turn
    batch.token_ids[8] = 9
    beyond = beyond_stop(batch, torch.tensor([1, 2, 5, 6]), 3, (2,))
    assert beyond.T.tolist() == [[False, False, True], [False, True, True], [False] * 3, [False] * 3]
