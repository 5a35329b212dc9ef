"""The draft vocabulary."""

import pytest
import torch

from drafters.aux_layers import choose_tokens


def test_most_frequent_tokens_ascending():
    counts = torch.tensor([0, 5, 1, 0, 9, 2])
    tokens = choose_tokens(counts, 3)
    assert tokens.tolist() == [1, 4, 5]


def test_ties_and_leftover_rows_go_to_the_lowest_ids():
    assert choose_tokens(torch.tensor([1, 0, 1, 1, 0, 0]), 2).tolist() == [0, 2]
    assert choose_tokens(torch.tensor([0, 0, 0, 0, 7, 0]), 3).tolist() == [0, 1, 4]


def test_special_tokens_are_always_in():
    assert choose_tokens(torch.tensor([9, 8, 7, 0, 0]), 2, always=[4]).tolist() == [0, 4]


def test_sizes_that_cannot_work():
    with pytest.raises(ValueError, match="draft_vocab_size 1 is below the 2 tokens"):
        choose_tokens(torch.zeros(5), 1, always=[3, 4])
