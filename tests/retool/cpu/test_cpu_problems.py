"""The problems of the CPU run: of our own making, each with the answer that two independent ways of computing it give.

To add a problem: a line in examples/retool/cpu/problems.jsonl, and here, under words of its text that no other problem
has, a search that takes it literally and another way (a formula, a theorem, a different algorithm).
"""

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, count, permutations, product

import pytest
from cpu.options import parse_options

ROWS = [json.loads(line) for line in parse_options([]).problems.read_text(encoding="utf-8").splitlines()]
GOLDEN = (1 + math.sqrt(5)) / 2


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@cache
def sieve(limit: int) -> tuple[int, ...]:
    """The primes below `limit`, without division."""
    composite = bytearray(limit)
    for n in range(2, limit):
        if not composite[n]:
            composite[n * n :: n] = b"\1" * len(range(n * n, limit, n))
    return tuple(n for n in range(2, limit) if not composite[n])


def factor(n: int) -> dict[int, int]:
    powers: dict[int, int] = {}
    for p in count(2):
        if p * p > n:
            break
        while n % p == 0:
            powers[p], n = powers.get(p, 0) + 1, n // p
    return powers | ({n: powers.get(n, 0) + 1} if n > 1 else {})


def divisor_count(n: int) -> int:
    return math.prod(power + 1 for power in factor(n).values())


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def totient(n: int) -> int:
    return math.prod(p ** (power - 1) * (p - 1) for p, power in factor(n).items())


def order(a: int, n: int) -> int:
    """The least k > 0 with a^k = 1 modulo n, among the divisors of the totient."""
    return next(k for k in divisors(totient(n)) if pow(a, k, n) == 1)


def digit_sum(n: int) -> int:
    return sum(map(int, str(n)))


def valuation_of_factorial(n: int, p: int) -> int:
    """Legendre: the power of the prime p in n!."""
    return sum(n // p**k for k in range(1, n.bit_length() + 1))


def power_slowly(a: int, n: int, m: int) -> int:
    result = 1
    for _ in range(n):
        result = result * a % m
    return result


def fibonacci() -> Iterator[int]:
    a, b = 1, 1
    while True:
        yield a
        a, b = b, a + b


def derangements(n: int) -> int:
    return sum((-1) ** k * math.factorial(n) // math.factorial(k) for k in range(n + 1))


def partitions(n: int, largest: int) -> int:
    if n == 0:
        return 1
    return sum(partitions(n - part, part) for part in range(1, min(n, largest) + 1))


def pentagonal(n: int) -> int:
    """The number of partitions of n by Euler's recurrence."""
    p = [1]
    for m in range(1, n + 1):
        terms = ((k * (3 * k - s) // 2, (-1) ** (k + 1)) for k in range(1, m + 1) for s in (1, -1))
        p.append(sum(sign * p[m - shift] for shift, sign in terms if shift <= m))
    return p[n]


@cache
def lattice_paths(x: int, y: int) -> int:
    """From (0, 0) to (x, y) by unit steps right and up, never above the diagonal."""
    if x == y == 0:
        return 1
    return (lattice_paths(x - 1, y) if x > y else 0) + (lattice_paths(x, y - 1) if y else 0)


def chinese_remainder(residues: dict[int, int]) -> int:
    modulus = math.prod(residues)
    return sum(r * (modulus // m) * pow(modulus // m, -1, m) for m, r in residues.items()) % modulus


def frobenius(a: int, b: int) -> int:
    reached = {a * x + b * y for x in range(b + 1) for y in range(a + 1)}
    return max(set(range(a * b)) - reached)


def josephus(people: int, step: int) -> int:
    place = 0
    for size in range(2, people + 1):
        place = (place + step) % size
    return place + 1


def josephus_played(people: int, step: int) -> int:
    circle = list(range(1, people + 1))
    place = 0
    while len(circle) > 1:
        place = (place + step - 1) % len(circle)
        del circle[place]
    return circle[0]


# (literally, otherwise) of the problem whose text holds these words.
ANSWERS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "47 * 86": (
        lambda: 47 * 86,
        lambda: sum(47 for _ in range(86)),
    ),
    "1003 - 458": (
        lambda: 1003 - 458,
        lambda: len(range(458, 1003)),
    ),
    "15% of 640": (
        lambda: 640 * 15 // 100,
        lambda: Fraction(15, 100) * 640,
    ),
    "is $2^{20}$": (
        lambda: 2**20,
        lambda: 1 << 20,
    ),
    "from 1 to 250": (
        lambda: sum(range(251)),
        lambda: 250 * 251 // 2,
    ),
    "987654321 is divided": (
        lambda: 987654321 % 97,
        lambda: 987654321 - 97 * math.floor(Fraction(987654321, 97)),
    ),
    "greatest common divisor": (
        lambda: max(set(divisors(1764)) & set(divisors(2310))),
        lambda: math.gcd(1764, 2310),
    ),
    "least common multiple": (
        lambda: next(n for n in count(12, 12) if all(n % k == 0 for k in range(1, 13))),
        lambda: math.lcm(*range(1, 13)),
    ),
    "divisors does 5040 have": (
        lambda: len(divisors(5040)),
        lambda: divisor_count(5040),
    ),
    "sum of the prime numbers": (
        lambda: sum(filter(is_prime, range(100))),
        lambda: sum(sieve(100)),
    ),
    "Write $\\frac{1}{3}": (
        lambda: Fraction(1, 3) + Fraction(1, 4) + Fraction(1, 6),
        lambda: f"{(4 + 3 + 2) // math.gcd(9, 12)}/{12 // math.gcd(9, 12)}",
    ),
    "largest prime factor": (
        lambda: max(d for d in divisors(360360) if is_prime(d)),
        lambda: max(factor(360360)),
    ),
    "divisible by 3 or by 7": (
        lambda: sum(n % 3 == 0 or n % 7 == 0 for n in range(1, 1001)),
        lambda: 1000 // 3 + 1000 // 7 - 1000 // 21,
    ),
    "digits of $2^{100}$": (
        lambda: digit_sum(2**100),
        lambda: sum(2**100 // 10**k % 10 for k in range(31)),
    ),
    "zeros stand at the end": (
        lambda: len(str(math.factorial(125))) - len(str(math.factorial(125)).rstrip("0")),
        lambda: valuation_of_factorial(125, 5),
    ),
    "units digit": (
        lambda: power_slowly(7, 2024, 10),
        lambda: 7 ** (2024 % 4 or 4) % 10,
    ),
    "$3^{1000}$ is divided": (
        lambda: power_slowly(3, 1000, 101),
        lambda: pow(3, 1000 % 100, 101),
    ),
    "4 people be chosen": (
        lambda: sum(1 for _ in combinations(range(11), 4)),
        lambda: math.comb(11, 4),
    ),
    "letters of BANANA": (
        lambda: len(set(permutations("BANANA"))),
        lambda: math.factorial(6) // (math.factorial(3) * math.factorial(2)),
    ),
    "Two fair dice": (
        lambda: Fraction(sum(a + b == 8 for a, b in product(range(1, 7), repeat=2)), 36),
        lambda: Fraction(6 - abs(8 - 7), 36),
    ),
    "coprime to 720": (
        lambda: sum(math.gcd(n, 720) == 1 for n in range(1, 721)),
        lambda: totient(720),
    ),
    "leaves remainder 2": (
        lambda: next(n for n in count(1) if (n % 3, n % 5, n % 7) == (2, 3, 4)),
        lambda: chinese_remainder({3: 2, 5: 3, 7: 4}),
    ),
    "inverse of 17": (
        lambda: next(n for n in range(1, 101) if 17 * n % 101 == 1),
        lambda: pow(17, 101 - 2, 101),
    ),
    "first Fibonacci number": (
        lambda: next(f for f in fibonacci() if f > 999_999),
        lambda: round(GOLDEN ** math.ceil(math.log(10**6 * math.sqrt(5), GOLDEN)) / math.sqrt(5)),
    ),
    "Stamps come in values": (
        lambda: frobenius(9, 11),
        lambda: 9 * 11 - 9 - 11,
    ),
    "6 letters be put": (
        lambda: sum(all(i != p for i, p in enumerate(places)) for places in permutations(range(6))),
        lambda: derangements(6),
    ),
    "paths of unit steps": (
        lambda: lattice_paths(8, 8),
        lambda: math.comb(16, 8) // 9,
    ),
    "20 be written as a sum": (
        lambda: partitions(20, 20),
        lambda: pentagonal(20),
    ),
    "ordered pairs (x, y)": (
        lambda: sum(12 * (x + y) == x * y for x in range(1, 157) for y in range(1, 157)),
        lambda: divisor_count(12**2),
    ),
    "41 people numbered": (
        lambda: josephus_played(41, 3),
        lambda: josephus(41, 3),
    ),
    "no two consecutive integers": (
        lambda: sum(not (bits & bits >> 1) for bits in range(2**12)),
        lambda: next(f for n, f in enumerate(fibonacci(), 1) if n == 14),
    ),
    "101 divides $10^k - 1$": (
        lambda: next(k for k in count(1) if (10**k - 1) % 101 == 0),
        lambda: order(10, 101),
    ),
    "highest power of 2": (
        lambda: next(k for k in count() if (3**64 - 1) % 2 ** (k + 1)),
        lambda: (3 - 1).bit_length() - 1 + (3 + 1).bit_length() - 1 + (64).bit_length() - 1 - 1,
    ),
    "solutions does $x^2": (
        lambda: sum(x * x % 840 == 1 for x in range(840)),
        lambda: 4 * 2 ** len([p for p in factor(840) if p > 2]),
    ),
    "divisible by 43": (
        lambda: sum(n for n in range(1, 1000) if (n * n + n + 41) % 43 == 0),
        lambda: sum(n for r in range(43) if (r * r + r) % 43 == 2 for n in range(r, 1000, 43)),
    ),
    "n at most 2000": (
        lambda: sum((2**n - n * n) % 7 == 0 for n in range(1, 2001)),
        lambda: sum(len(range(r or 21, 2001, 21)) for r in range(21) if 2 ** (r % 3) % 7 == r * r % 7),
    ),
    "$1! + 2! + 3!": (
        lambda: sum(math.factorial(k) for k in range(1, 101)) % 1001,
        lambda: chinese_remainder({m: sum(math.factorial(k) for k in range(1, m)) % m for m in (7, 11, 13)}),
    ),
    "$2023^{2024^{2025}}$ is divided": (
        lambda: pow(2023, pow(2024, 2025), 1000),
        lambda: pow(23, pow(2024, 2025, totient(1000)), 1000),
    ),
    "n at most 500": (
        lambda: sum((2**n + 1) % n == 0 for n in range(1, 501)),
        lambda: sum(pow(2, n, n) == n - 1 for n in range(1, 501, 2)),
    ),
    "10 is a primitive root": (
        lambda: sum(p for p in filter(is_prime, range(7, 200)) if len({10**k % p for k in range(1, p)}) == p - 1),
        lambda: sum(p for p in sieve(200) if p > 5 and order(10, p) == p - 1),
    ),
    "ordered triples": (
        lambda: sum(
            math.gcd(a, b) == math.gcd(b, c) == math.gcd(a, c) == 1
            for a in divisors(2520)
            for b in divisors(2520 // a)
            for c in [2520 // a // b]
        ),
        lambda: 3 ** len(factor(2520)),
    ),
    "exactly 24 positive divisors": (
        lambda: next(n for n in count(1) if len(d := divisors(n)) == 24 and sum(x % 2 for x in d) == 8),
        lambda: 2 ** (24 // 8 - 1) * min(m for m in range(1, 3000, 2) if divisor_count(m) == 8),
    ),
}


def answers_agree(label: str, literally: Callable[[], object], otherwise: Callable[[], object]) -> bool:
    return str(literally()) == str(otherwise()) == label


@pytest.mark.parametrize("words", ANSWERS)
def test_the_label_is_what_two_ways_of_computing_it_give(words):
    [row] = [row for row in ROWS if words in row["prompt"]]
    assert answers_agree(row["label"], *ANSWERS[words])


@pytest.mark.parametrize("label, first, second", [("4", 4, 5), ("4", 5, 4), ("5", 4, 4)])
def test_answers_that_differ_are_found(label, first, second):
    assert not answers_agree(label, lambda: first, lambda: second)


def test_there_are_about_forty_different_problems_with_answers_as_text():
    assert len(ROWS) == len(ANSWERS) >= 40
    assert len({row["prompt"] for row in ROWS}) == len(ROWS)
    assert all(set(row) == {"prompt", "label"} and isinstance(row["label"], str) and row["label"] for row in ROWS)
