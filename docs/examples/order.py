"""Compute the order of an epoch as docs/order.md states it, and compare it with shardkit's."""

import bisect
import hashlib
import itertools
import math

import numpy as np

from shardkit import Balanced, Weighted
from shardkit.orders.bucket_order import BucketOrder, BucketSizes
from shardkit.sampling.order import Order

M, G = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(x):
    """Return the output of SplitMix64 for a state."""
    x &= M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31


def key(purpose, seed, epoch):
    """Return the key of a purpose in an epoch."""
    text = f"shardkit {purpose} {seed} {epoch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permuted(i, n, k):
    """Return the number at position ``i`` of ``n`` shuffled numbers."""
    if n <= 4096:
        return sorted(range(n), key=lambda j: mix(k + (j + 1) * G))[i]
    return feistel(i, n, k)


def feistel(i, n, k):
    """Return the number that a Feistel network puts at position ``i`` of ``n``."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(i, b)
        for number in range(8):
            if number % 2:
                right = (right + mix(left + mix(k + number * G)) % b) % b
            else:
                left = (left + mix(right + mix(k + number * G)) % a) % a
        i = left * b + right
        if i < n:
            return i


for size in (1000, 10_007):
    ours = Order(size=size, shuffle=True, seed=7).rows(3, np.arange(5)).tolist()
    assert ours == [permuted(i, size, key("rows", 7, 3)) for i in range(5)]


def weighted(p, weights, seed, epoch):
    """Return the row that `Weighted` draws at a position."""
    sums = list(itertools.accumulate(weights))
    u = (mix(key("weighted", seed, epoch) + (p + 1) * G) >> 11) * 2.0**-53 * sums[-1]
    return bisect.bisect_right(sums, u)


def grouped(p, groups, counts, seed, epoch):
    """Return the row of `Balanced` or `Mixture` at a position."""
    q = epoch * sum(map(len, groups)) % 2**62 + p
    m, offset = divmod(q, sum(counts))
    slot = feistel(offset, sum(counts), mix(key("groups", seed, 0) + m * G))
    g = 0
    while slot >= counts[g]:
        slot, g = slot - counts[g], g + 1
    turn, i = divmod(m * counts[g] + slot, len(groups[g]))
    k = mix(mix(key("members", seed, 0) + g * G) + turn * G)
    return groups[g][feistel(i, len(groups[g]), k)]


def bucketed(p, groups, step, seed, epoch):
    """Return the row of `Buckets` at a position."""
    counts = [len(group) // step for group in groups]
    slot, g = permuted(p // step, sum(counts), key("buckets", seed, epoch)), 0
    while slot >= counts[g]:
        slot, g = slot - counts[g], g + 1
    k = mix(mix(key("bucket", seed, 0) + g * G) + epoch * G)
    return groups[g][feistel(slot * step + p % step, len(groups[g]), k)]


class Labeled:
    """A dataset of 100 labels."""

    targets = np.arange(100) % 7 % 4

    def __len__(self):
        return len(self.targets)


weights = 1 / np.arange(1, 101)
classes = [np.flatnonzero(Labeled.targets == label).tolist() for label in range(4)]
ours = Weighted(weights).order(Labeled(), seed=7).rows(3, np.arange(300)).tolist()
assert ours == [weighted(p, weights.tolist(), 7, 3) for p in range(300)]
ours = Balanced().order(Labeled(), seed=7).rows(3, np.arange(300)).tolist()
assert ours == [grouped(p, classes, [1, 1, 1, 1], 7, 3) for p in range(300)]

counts, members = np.array(list(map(len, classes))), np.concatenate(classes)
sizes = BucketSizes(((4, 1), (2, 1), (1, 1), (1, 2)))
order = BucketOrder(size=100, seed=7, sizes=sizes, counts=counts, members=members).in_batches(8)
ours = order.rows(3, np.arange(order.size)).tolist()
assert ours == [bucketed(p, classes, 8, 7, 3) for p in range(order.size)]
