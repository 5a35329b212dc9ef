"""Which steps try another draft length than the chosen one, so that costs and acceptance of all lengths stay known."""

import numpy as np

from cotrain.engine.speculation.step_costs import Array

BLOCK_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so the times of 4 are of one length."""

UNSURE = 0.1  # standard error of log t_k / t_0 above which a length is tried at once, if it could be the fastest

TRIAL_SHARE = 0.01  # share of the decoding time that trials of lengths which seem slower may take

LEAST_LOSS = 0.05  # what a step of a trial costs at least, in steps of the chosen length


class Trials:
    """Takes turns among lengths that may be the fastest; then tries every length now and then, however slow it seems."""

    def __init__(self, max_speculative_tokens: int):
        self.length: int | None = None
        """Draft tokens of every request in the present block; None if it drafts what was chosen."""
        self._longest, self._last, self._debt = max_speculative_tokens, 0, 0.0

    def begin_block(self, tokens: Array, ratios: Array, errors: Array) -> None:
        """Decide on the next block, from the expected tokens of a step, t_k / t_0 and its errors at the present batch size [K+1]."""
        gains = tokens / ratios
        best = int(gains.argmax())
        open_ = (errors > UNSURE) & (gains * np.exp(2 * errors) > gains[best])
        turns = [(self._last - 1 - i) % (self._longest + 1) for i in range(self._longest + 1)]
        if open_.any():
            open_[[0, best]] = True  # which the others are compared with
            self.length = self._last = next(k for k in turns if open_[k])
            return
        self.length = None
        self._debt -= TRIAL_SHARE * BLOCK_STEPS
        if self._debt <= 0:
            self.length = self._last = k = next(k for k in turns if k != best)
            self._debt = BLOCK_STEPS * max(LEAST_LOSS, ratios[k] / ratios[best] * (1 - gains[k] / gains[best]))
