"""The distribution of the next token given an index of rollouts. Drafts are drawn from it. Compiled with numba.

Texts lie in one array, each after a SEPARATOR. A segment has positions of some of them, sorted by the tokens before them, compared
from the last token backwards. So all positions that follow a given context are neighbours, found by one binary search per token.
Segments are passed as rows of addresses and sizes, because there are many and they change.
"""

import numba
import numpy as np
from numba import types

SEPARATOR = -1
DEPTH = 32  # longest context, in tokens, that texts are sorted and matched by

LEVELS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32], np.int32)
"""Lengths of context, in tokens, whose counts are blended."""

MOST_PLACES = 32
"""Most places in the request's own text that are counted, the latest ones. In each segment, at each level, fewer than twice as
many are counted, evenly spread."""

ESCAPE = 0.5
"""Shorter contexts get the share ESCAPE n / (total + ESCAPE n) of the distribution, for n different next tokens. This is the
escape probability of prediction by partial matching (method C of Moffat 1990 has ESCAPE = 1)."""

OWN_WEIGHT = 2.0  # weight of a place in the request's own text. A place in a text of the same prompt has weight 1.

LEAST_SHARE = 1 / 64  # share of the distribution below which shorter contexts are left out

EVERY_PROMPT_WEIGHT = 0.05  # weight of a place in a text of any prompt: style repeats across problems, content less so

WIDTH = 256  # most tokens to which a distribution gives probability

BUCKETS = 4096  # number of linked lists of a request's own places; a power of two

_compiled = numba.njit(cache=True, nogil=True)


@numba.extending.intrinsic
def _pointer(_, address):
    """Return an address (int64) as a pointer to int32."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


@_compiled
def _arrays(segment):
    """Return the text and the positions of a row of addresses and sizes: see index.Scope."""
    text, order, size, num_positions = segment
    return numba.carray(_pointer(text), size), numba.carray(_pointer(order), num_positions)


@_compiled
def _before(text, i, j):
    """Return whether the context of position i is sorted before that of j, or is the same."""
    for m in range(1, DEPTH + 1):
        a, b = text[i - m], text[j - m]
        if a != b:
            return a < b
        if a == SEPARATOR:
            break
    return True


@_compiled
def merge(text, first, second, merged, reached, most):
    """Merge two segments by context into `merged`, at most `most` positions from where it stopped before.

    reached [2]: how many positions of each were merged; it is brought up to date.
    """
    i, j = reached
    for out in range(i + j, min(len(merged), i + j + most)):
        if j == len(second) or (i < len(first) and _before(text, first[i], second[j])):
            merged[out] = first[i]
            i += 1
        else:
            merged[out] = second[j]
            j += 1
    reached[0], reached[1] = i, j


@_compiled
def sort(text, order):
    """Sort ascending positions of a text by context, in place."""
    width = 1
    while width < len(order):
        before = order.copy()
        for start in range(0, len(order), 2 * width):
            middle, end = start + width, start + 2 * width
            merge(text, before[start:middle], before[middle:end], order[start:end], np.zeros(2, np.int64), 2 * width)
        width *= 2


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
def _places(text, order, own_text, length, response_start, lows, highs):
    """Find, for each level, the range of places whose context ends like this one. Returns the length of the longest match."""
    low, high, level, longest = 0, len(order), 0, min(DEPTH, length - response_start + 1)
    for m in range(1, longest + 1):
        token = own_text[length - m] if length - m >= response_start else np.int32(SEPARATOR)
        low = _bound(text, order, low, high, m, token)
        if low == high or text[order[low] - m] != token:
            return m - 1
        high = _bound(text, order, low, high, m, token + 1)
        if LEVELS[level] == m:
            lows[level], highs[level] = low, high
            level += 1
    return longest


@_compiled
def follow(texts, links, heads, lengths, rows, batch_texts, batch_lengths):
    """Bring rows of RequestTexts up to the end of a step: see RequestTexts.follow."""
    for i, row in enumerate(rows):
        known, text = lengths[row], texts[row]
        length = max(known, batch_lengths[i])
        text[known:length] = batch_texts[i, known:length]
        _link(text, links[row], heads[row], known, length)
        lengths[row] = length


@_compiled
def _link(text, links, heads, known, length):
    """Link places up to `length`, excluded, where those up to `known` are linked. A place is linked by the token before it."""
    for place in range(max(known, 1), length):
        bucket = text[place - 1] & (BUCKETS - 1)
        links[place], heads[bucket] = heads[bucket], place


@_compiled
def _own_places(text, length, links, heads, places, matched):
    """Find earlier places of a request's own text that follow its last token, the latest first. Returns their number."""
    n, last = 0, length - 1
    place = heads[text[last] & (BUCKETS - 1)]
    while place > 0:
        if text[place - 1] == text[last]:
            m = 1
            while m < DEPTH and place - 1 - m >= 0 and text[place - 1 - m] == text[last - m]:
                m += 1
            places[n], matched[n] = place, m
            n += 1
            if n == MOST_PLACES:
                break
        place = links[place]
    return n


@_compiled
def _count(tokens, mass, slots, n, following, weight):
    """Add weight to the mass of each of these tokens, and return the number of tokens.

    A token is found in a hash table of 2 WIDTH slots. A new one for which there is no room is left out.
    """
    for token in following:
        slot = (token * 40503) & (2 * WIDTH - 1)
        while slots[slot] >= 0 and tokens[slots[slot]] != token:
            slot = (slot + 1) & (2 * WIDTH - 1)
        if slots[slot] < 0:
            if n == WIDTH:
                continue
            slots[slot], tokens[n], mass[n] = n, token, 0.0
            n += 1
        mass[slots[slot]] += weight
    return n


@_compiled
def _next_distribution(segments, num_own, text, length, response_start, links, heads, tokens, probabilities):
    """Compute the distribution of the token after a context.

    segments int64 [S, 4]: the segments to look at, of which num_own hold texts of the same prompt, and the others those of all
    prompts. text[:length]: prompt and response. The index holds only responses, so only the response (from response_start on) is
    looked up in it; the whole text is looked up in itself. Fills tokens and probabilities [WIDTH]; returns their number and the
    longest match's length.
    """
    lows, highs = np.zeros((len(segments), len(LEVELS)), np.int32), np.zeros((len(segments), len(LEVELS)), np.int32)
    own, own_matched = np.empty(MOST_PLACES, np.int32), np.empty(MOST_PLACES, np.int32)
    slots, mass = np.full(2 * WIDTH, -1, np.int32), np.empty(WIDTH)
    longest = 0
    for s in range(len(segments)):
        found, order = _arrays(segments[s])
        longest = max(longest, _places(found, order, text, length, response_start, lows[s], highs[s]))
    num_places = _own_places(text, length, links, heads, own, own_matched)
    for i in range(num_places):
        longest = max(longest, own_matched[i])
    share, n = 1.0, 0
    for level in range(len(LEVELS) - 1, -1, -1):
        if LEVELS[level] > longest:
            continue
        mass[:n] = 0.0
        seen = n
        for s in range(len(segments)):
            low, high = lows[s, level], highs[s, level]
            stride = max(1, (high - low) // MOST_PLACES)
            weight = 1.0 if s < num_own else EVERY_PROMPT_WEIGHT
            found, order = _arrays(segments[s])
            n = _count(tokens, mass, slots, n, found[order[low:high:stride]], weight * stride)
        for i in range(num_places):
            if own_matched[i] >= LEVELS[level]:
                n = _count(tokens, mass, slots, n, text[own[i] : own[i] + 1], OWN_WEIGHT)
        probabilities[seen:n] = 0.0
        total, different = mass[:n].sum(), np.count_nonzero(mass[:n])
        if total <= 0:
            continue
        escape = ESCAPE * different / (total + ESCAPE * different)
        for i in range(n):  # an array of them all would take memory in each level
            probabilities[i] += share * (1 - escape) * mass[i] / total
        share *= escape
        if share < LEAST_SHARE:
            break
    if n:
        probabilities[:n] /= probabilities[:n].sum()
    return n, longest


@_compiled
def _draw(probabilities, rng):
    """Return a number drawn from its distribution."""
    sums = np.cumsum(probabilities)
    return np.searchsorted(sums, rng.random() * sums[-1], side="right")


@_compiled
def draft(requests, rows, response_starts, own, own_ends, every, k, draws, rng):
    """Propose at most k tokens for each of R requests: drawn from their distributions where `draws`, otherwise the likeliest.

    requests: texts, links, heads and lengths of RequestTexts. rows [R]: the requests, -1 for none. own, every int64 [S, 4]:
    segments of the requests' prompts, of which request i has those before own_ends[i] and after own_ends[i - 1], and those of all
    prompts. draws [R]. Returns what index.Drafts holds.
    """
    texts, links, heads, lengths = requests
    size, num_every, most = len(rows), len(every), 0
    for i in range(size):
        most = max(most, own_ends[i] - (own_ends[i - 1] if i else 0))
    segments = np.empty((most + num_every, every.shape[1]), np.int64)
    tokens, sizes = np.zeros((size, k), np.int32), np.zeros((size, k), np.int32)
    supports, probabilities = np.empty((size, k, WIDTH), np.int32), np.empty((size, k, WIDTH))
    nums, matches = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for i, row in enumerate(rows):
        if row < 0:
            continue
        begin = own_ends[i - 1] if i else 0
        num_own = own_ends[i] - begin
        segments[:num_own], segments[num_own : num_own + num_every] = own[begin : own_ends[i]], every
        text, length = texts[row], lengths[row]
        heads_here = heads[row].copy()  # draft tokens are linked for the draft alone
        for j in range(k):
            _link(text, links[row], heads_here, length + j - (j > 0), length + j)
            n, longest = _next_distribution(
                segments[: num_own + num_every], num_own, text, length + j, response_starts[i], links[row], heads_here,
                supports[i, j], probabilities[i, j],
            )  # fmt: skip
            if j == 0:
                matches[i] = longest
            if n == 0:
                break
            chosen = _draw(probabilities[i, j, :n], rng) if draws[i] else int(probabilities[i, j, :n].argmax())
            text[length + j] = tokens[i, j] = supports[i, j, chosen]
            sizes[i, j] = n
            nums[i] += 1
    return tokens, supports, probabilities, sizes, nums, matches


@_compiled
def spread(tokens, supports, probabilities, sizes, nums, likeliest, longest, vocab_size):
    """Return the distributions of drafts as flat places in [R, longest, V], and the probabilities there.

    A token that was not drawn has all the probability of its distribution. likeliest [R]: are the tokens of a request such?
    """
    total = 0
    for i in range(len(nums)):
        for j in range(nums[i]):
            total += 1 if likeliest[i] else sizes[i, j]
    places, values, at = np.empty(total, np.int64), np.empty(total, np.float32), 0
    for i in range(len(nums)):
        for j in range(nums[i]):
            start = (i * longest + j) * vocab_size
            if likeliest[i]:
                places[at], values[at] = start + tokens[i, j], 1.0
                at += 1
                continue
            for slot in range(sizes[i, j]):
                places[at], values[at] = start + supports[i, j, slot], probabilities[i, j, slot]
                at += 1
    return places, values
