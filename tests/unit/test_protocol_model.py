"""The cross-rank protocol, explored exhaustively: every interleaving of a small model of it.

A rank's call is a set of steps with a partial order. A step can be done once the steps before it are done
and, if it waits for a word, once that word equals the expected one. Steps towards different peers, and the
parts that different thread blocks do, are independent of each other, so all their orders are explored. Every
word and buffer has one writer; its content follows from the writer's last call in which the step that writes
it was done, so a state is (call, steps done) of each rank. Every read checks that what it finds was written
in the reader's own call.

Explored: 2 ranks for 3 calls with two thread blocks each, 3 ranks for 2 calls with one. Each mutation drops
one rule and has to be caught.
"""

from collections import deque

import pytest

F, B = "forward", "backward"
DENSE = "dense"  # every rank holds rows of every other


class Violation(Exception):
    """Something that the protocol must exclude can happen."""


class Mismatch(Violation):
    """A wait saw another current word than its own."""


class Rank:
    """One rank's calls: for each its steps (name, peer, part), and the steps before each as a bit mask."""

    def __init__(self, model, rank):
        self.stamps = [(n, *call) for n, call in enumerate(model.calls[rank])]
        orders = [model.order(rank, n) for n in range(len(self.stamps))]
        self.steps = [list(order) for order in orders]
        self.bit = [{step: 1 << i for i, step in enumerate(steps)} for steps in self.steps]
        self.masks = [
            [sum(bit[b] for b in before) for before in order.values()]
            for order, bit in zip(orders, self.bit, strict=True)
        ]
        self.full = [(1 << len(steps)) - 1 for steps in self.steps]


class Model:
    """calls[r] lists rank r's calls as (kind, layer). held[n] = pairs (holder, owner): holder computes rows
    of owner's tokens in call n; DENSE: all pairs. parts: thread blocks of a rank, each of which moves rows.
    """

    def __init__(self, calls, held=DENSE, mutation=None, parts=1):
        self.calls, self.mutation, self.parts = calls, mutation, range(parts)
        every = range(len(calls))
        pairs = {(h, o) for h in every for o in every if h != o}
        self.held = [pairs] * max(map(len, calls)) if held == DENSE else held
        self.ranks = [Rank(self, r) for r in every]

    def order(self, rank, n):
        """{step: steps before it} of one call."""
        mutation = self.mutation
        kind = self.calls[rank][n][0]
        peers = [p for p in range(len(self.calls)) if p != rank]
        owners = [p for p in peers if (rank, p) in self.held[n]]
        holders = [p for p in peers if (p, rank) in self.held[n]]

        def each(name, whom=peers, parts=(0,)):
            return {(name, p, part) for p in whom for part in parts}

        copy = each("copy", [-1], self.parts)
        route = each("route") if kind == F else set()  # ids travel in forward only
        read = each("read ids", peers, self.parts) if kind == F else set()
        awaited = each("await")
        finished = each("await done", holders if mutation == "await done of holders only" else peers)
        moved = each("push" if mutation == "done before the flush" else "land", owners, self.parts)
        late = set()
        if mutation == "await only whom it pulls from" and kind == B:
            late = awaited - each("await", owners)
            awaited -= late

        before = dict.fromkeys(sorted(copy | route), set())
        before |= dict.fromkeys(
            sorted(each("publish")), route if mutation == "publish before the copy" else copy | route
        )
        before |= dict.fromkeys(sorted(awaited), each("publish"))
        before |= dict.fromkeys(sorted(read), awaited)
        for _, p, part in sorted(each("", owners, self.parts)):
            before["pull", p, part] = awaited | read
            free = mutation == "push before the publication" and kind == B
            before["push", p, part] = set() if free else {("pull", p, part)}
            before["land", p, part] = {("push", p, part)}  # complete some time after it is issued
        before |= dict.fromkeys(
            sorted(each("done")), awaited | read | each("pull", owners, self.parts) | moved
        )
        before |= dict.fromkeys(sorted(late), each("done"))
        before |= dict.fromkeys(sorted(finished), each("done"))
        if mutation != "publish before the reduction":
            before |= dict.fromkeys(sorted(each("reduce", holders, self.parts)), finished)
        elif n > 0:  # the reduction of the call before, at any time in this one
            holders = [p for p in peers if (p, rank) in self.held[n - 1]]
            before |= dict.fromkeys(sorted(each("late reduce", holders, self.parts)), set())
        return before

    def written(self, state, writer, step):
        """Stamp of the last call in which `writer` has done `step`, or None."""
        n, mask = state[writer]
        ranks = self.ranks[writer]
        if n < len(ranks.stamps) and mask & ranks.bit[n].get(step, 0):
            return ranks.stamps[n]
        for earlier in range(n - 1, -1, -1):
            if step in ranks.bit[earlier]:
                return ranks.stamps[earlier]
        return None

    def can(self, state, rank, step):
        """Whether a step whose predecessors are done can be done now. Violation if it goes wrong."""
        name, peer, part = step
        n = state[rank][0]
        mine = self.ranks[rank].stamps[n]
        if name in ("await", "await done"):
            word = self.written(state, peer, ("publish" if name == "await" else "done", rank, 0))
            if word is None or word[0] < mine[0]:
                return False
            if self.mutation == "compare with >=" or word == mine:
                return True
            if self.mutation == "compare call numbers only" and word[0] == mine[0]:
                return True
            raise Mismatch(f"rank {rank} in {mine} sees {word} of rank {peer}")
        if name == "late reduce":
            mine = self.ranks[rank].stamps[n - 1]
        sources = [("copy", -1, q) for q in self.parts] if name == "pull" else []
        sources += [("route", rank, 0)] if name == "read ids" else []
        sources += [("land", rank, q) for q in self.parts] if name in ("reduce", "late reduce") else []
        for source in sources:
            found = self.written(state, peer, source)
            if found != mine:
                raise Violation(f"rank {rank}: {name} in {mine} gets what rank {peer} wrote in {found}")
        return True

    def explore(self, same_calls=True):
        """Number of reachable states. Violation if one is wrong.

        same_calls=False: ranks may make different calls. Then a mismatch ends a rank, and so does
        waiting (the time-out); wrong data stays a violation.
        """
        start = tuple((0, 0) for _ in self.ranks)
        known, todo = {start}, deque([start])
        while todo:
            state = todo.popleft()
            stuck = True
            for rank, (n, mask) in enumerate(state):
                me = self.ranks[rank]
                if n == len(me.stamps):
                    continue
                for i, step in enumerate(me.steps[n]):
                    if mask >> i & 1 or me.masks[n][i] & ~mask:
                        continue
                    try:
                        if not self.can(state, rank, step):
                            continue
                    except Mismatch:
                        if same_calls:
                            raise
                        continue
                    stuck = False
                    done = mask | 1 << i
                    here = (n + 1, 0) if done == me.full[n] else (n, done)
                    after = (*state[:rank], here, *state[rank + 1 :])
                    if after not in known:
                        known.add(after)
                        todo.append(after)
            if (
                stuck
                and same_calls
                and any(n < len(r.stamps) for (n, _), r in zip(state, self.ranks, strict=True))
            ):
                raise Violation(f"nobody can go on in calls {[n for n, _ in state]}")
        return len(known)


TWO = [[(F, 1), (B, 1), (F, 2)]] * 2
KINDS = {"FFF": [[(F, 1), (F, 2), (F, 3)]] * 2, "FBF": TWO, "BBF": [[(B, 2), (B, 1), (F, 1)]] * 2}
ONE_WAY = {(0, 1)}  # rank 0 holds rows of rank 1; nobody holds rows of rank 0
SPARSE = [[set(), ONE_WAY, set()], [ONE_WAY, set(), {(1, 0)}], [ONE_WAY, ONE_WAY, {(0, 1), (1, 0)}]]


@pytest.mark.parametrize("calls", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("held", [DENSE, *SPARSE], ids=["dense", "sparse1", "sparse2", "sparse3"])
def test_two_ranks_three_calls(calls, held):
    assert Model(calls, held, parts=2).explore() > 100


@pytest.mark.parametrize("kinds", [(F, B), (B, B)], ids="-".join)
@pytest.mark.parametrize("held", [DENSE, [{(0, 1), (1, 2)}] * 2], ids=["dense", "sparse"])
def test_three_ranks_two_calls(kinds, held):
    assert Model([[(kind, 1) for kind in kinds]] * 3, held).explore() > 1000


MUTATIONS = {
    "publish before the copy": DENSE,
    "done before the flush": DENSE,
    "push before the publication": DENSE,
    "publish before the reduction": DENSE,
    "await done of holders only": [ONE_WAY] * 3,
    "await only whom it pulls from": [ONE_WAY] * 3,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_rule_is_needed(mutation):
    Model(TWO, MUTATIONS[mutation]).explore()
    with pytest.raises(Violation):
        Model(TWO, MUTATIONS[mutation], mutation).explore()


DIFFERENT = {
    "B49-one rank skips a call": ([(F, 1), (F, 2), (F, 3)], [(F, 1), (F, 3)]),
    "forward against backward": ([(F, 1), (B, 1), (F, 2)], [(F, 1), (F, 2), (B, 1)]),
    "other layer": ([(F, 1), (F, 2)], [(F, 1), (F, 3)]),
}


@pytest.mark.parametrize("calls", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_in_different_calls_get_no_wrong_data(calls):
    Model(calls).explore(same_calls=False)
    with pytest.raises(Mismatch):
        Model(calls).explore()


@pytest.mark.parametrize("mutation", ["compare with >=", "compare call numbers only"])
def test_words_must_be_compared_exactly(mutation):
    with pytest.raises(Violation, match="wrote in"):
        Model(DIFFERENT["forward against backward"], mutation=mutation).explore(same_calls=False)
