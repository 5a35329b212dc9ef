"""The distribution of the next token given an index of rollouts. Drafts are drawn from it. Compiled with numba.

A segment is a run of texts in one array, each after a SEPARATOR, with its positions sorted by the tokens before them, compared
from the last token backwards. So all positions that follow a given context are neighbours, found by one binary search per token.
"""

import numba
import numpy as np

SEPARATOR = -1
DEPTH = 32
"""Longest context, in tokens, that texts are sorted and matched by."""

LEVELS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32], np.int32)
"""Lengths of context, in tokens, whose counts are blended."""

MOST_PLACES = 32
"""Most places in the request's own text that are counted, the latest ones. In each segment, at each level, fewer than twice as
many are counted, evenly spread."""

ESCAPE = 0.5
"""Shorter contexts get the share ESCAPE n / (total + ESCAPE n) of the distribution, for n different next tokens. This is the
escape probability of prediction by partial matching (method C of Moffat 1990 has ESCAPE = 1)."""

OWN_WEIGHT = 2.0
"""Weight of a place in the request's own text. A place in a text of the same prompt has weight 1."""

LEAST_SHARE = 1 / 64
"""Share of the distribution below which shorter contexts are left out."""

WIDTH = 256
"""Most tokens to which a distribution gives probability."""

_compiled = numba.njit(cache=True, nogil=True)


@_compiled
def _before(text, i, j):
    """Return whether the context of position i is sorted before that of j."""
    for m in range(1, DEPTH + 1):
        a, b = text[i - m], text[j - m]
        if a != b:
            return a < b
        if a == SEPARATOR:
            break
    return i < j


@_compiled
def merge(text, order, middle, scratch):
    """Merge order[:middle] and order[middle:], each sorted by context, in place. scratch must be as long as order."""
    i, j, n = 0, middle, len(order)
    for out in range(n):
        if j == n or (i < middle and _before(text, order[i], order[j])):
            scratch[out] = order[i]
            i += 1
        else:
            scratch[out] = order[j]
            j += 1
    order[:] = scratch[:n]


@_compiled
def sort_by_context(text):
    """Return the positions of all tokens but separators in texts [n], each after a SEPARATOR, sorted by context: int32."""
    order = np.flatnonzero(text != SEPARATOR).astype(np.int32)
    scratch, width = np.empty_like(order), 1
    while width < len(order):
        for start in range(0, len(order) - width, 2 * width):
            merge(text, order[start : start + 2 * width], width, scratch)
        width *= 2
    return order


@_compiled
def _bound(text, order, low, high, back, token):
    """Return the first index in order[low:high] whose token `back` positions earlier is not below `token`."""
    while low < high:
        middle = (low + high) >> 1
        if text[order[middle] - back] < token:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _places(text, order, context, response_start, lows, highs):
    """Find, for each level, the range of places whose context ends like this one. Returns the length of the longest match."""
    low, high, level, length = 0, len(order), 0, len(context)
    for m in range(1, min(DEPTH, length - response_start + 1) + 1):
        token = context[length - m] if length - m >= response_start else np.int32(SEPARATOR)
        low = _bound(text, order, low, high, m, token)
        high = _bound(text, order, low, high, m, token + 1)
        if low == high:
            return m - 1
        if LEVELS[level] == m:
            lows[level], highs[level] = low, high
            level += 1
    return min(DEPTH, length - response_start + 1)


@_compiled
def _own_places(context, places, matched):
    """Find earlier places of a request's own text that follow its last token, the latest first. Returns their number."""
    length, n = len(context), 0
    for place in range(length - 1, 0, -1):
        if context[place - 1] == context[length - 1]:
            m = 1
            while m < DEPTH and place - 1 - m >= 0 and context[place - 1 - m] == context[length - 1 - m]:
                m += 1
            places[n], matched[n] = place, m
            n += 1
            if n == MOST_PLACES:
                break
    return n


@_compiled
def _count(tokens, mass, slots, n, token, weight):
    """Add weight to a token's mass, found in a hash table of 2 WIDTH slots. Returns the number of tokens."""
    slot = (token * 40503) & (2 * WIDTH - 1)
    while slots[slot] >= 0:
        if tokens[slots[slot]] == token:
            mass[slots[slot]] += weight
            return n
        slot = (slot + 1) & (2 * WIDTH - 1)
    if n < WIDTH:
        slots[slot], tokens[n], mass[n] = n, token, weight
        n += 1
    return n


@_compiled
def next_distribution(texts, orders, segments, scope_weights, context, response_start, tokens, probabilities):
    """Compute the distribution of the token after a context.

    texts, orders: int32 arrays of the whole index. segments int64 [S, 3]: start, size and number of positions of each
    segment to look at; scope_weights [S]: their weights. context: prompt and response [n]. The index holds only responses, so
    only the response (from response_start on) is looked up in it; the whole context is looked up in itself. Fills tokens and
    probabilities [WIDTH]; returns their number and the longest match's length.
    """
    num_segments, num_levels = len(segments), len(LEVELS)
    lows, highs = np.zeros((num_segments, num_levels), np.int32), np.zeros((num_segments, num_levels), np.int32)
    longest = 0
    for s in range(num_segments):
        start, size, count = segments[s]
        text, order = texts[start : start + size], orders[start : start + count]
        longest = max(longest, _places(text, order, context, response_start, lows[s], highs[s]))
    own, own_matched = np.empty(MOST_PLACES, np.int32), np.empty(MOST_PLACES, np.int32)
    num_own = _own_places(context, own, own_matched)
    for i in range(num_own):
        longest = max(longest, own_matched[i])
    slots, mass = np.full(2 * WIDTH, -1, np.int32), np.zeros(WIDTH)
    share, n = 1.0, 0
    for level in range(num_levels - 1, -1, -1):
        if LEVELS[level] > longest:
            continue
        mass[:n] = 0.0
        total, seen = 0.0, n
        for s in range(num_segments):
            start = segments[s, 0]
            low, high = lows[s, level], highs[s, level]
            stride = max(1, (high - low) // MOST_PLACES)
            for i in range(low, high, stride):
                place = start + orders[start + i]
                n = _count(tokens, mass, slots, n, texts[place], scope_weights[s] * stride)
        for i in range(num_own):
            if own_matched[i] >= LEVELS[level]:
                n = _count(tokens, mass, slots, n, context[own[i]], OWN_WEIGHT)
        probabilities[seen:n] = 0.0
        different = 0
        for i in range(n):
            total += mass[i]
            different += mass[i] > 0
        if total <= 0:
            continue
        escape = ESCAPE * different / (total + ESCAPE * different)
        for i in range(n):
            probabilities[i] += share * (1 - escape) * mass[i] / total
        share *= escape
        if share < LEAST_SHARE:
            break
    if n:
        probabilities[:n] /= probabilities[:n].sum()
    return n, longest


@_compiled
def draft(texts, orders, segments, scope_weights, context, response_start, k, draws, rng):
    """Propose n <= k tokens after a context: drawn from their distributions if `draws`, otherwise the likeliest.

    Returns the proposed tokens [n], the tokens and probabilities of their distributions [n, WIDTH], the size of each [n],
    and the length of the longest match before the first token. n < k where the index knows nothing that follows.
    """
    length = len(context)
    text = np.empty(length + k, np.int32)
    text[:length] = context
    supports, probabilities, sizes = np.empty((k, WIDTH), np.int32), np.empty((k, WIDTH)), np.empty(k, np.int32)
    first_match, num = 0, 0
    for j in range(k):
        so_far = text[: length + j]
        n, longest = next_distribution(
            texts, orders, segments, scope_weights, so_far, response_start, supports[j], probabilities[j]
        )
        if j == 0:
            first_match = longest
        if n == 0:
            break
        chosen = int(probabilities[j, :n].argmax())
        if draws:
            left, chosen = rng.random(), 0
            while chosen < n - 1 and left >= probabilities[j, chosen]:
                left -= probabilities[j, chosen]
                chosen += 1
            while probabilities[j, chosen] <= 0:  # rounding can lead to the last token, even if its probability is 0
                chosen -= 1
        text[length + j], sizes[j] = supports[j, chosen], n
        num += 1
    return text[length : length + num], supports[:num], probabilities[:num], sizes[:num], first_match
