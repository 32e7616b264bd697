"""Tokens on their way to the ranks of their experts: by an all-to-all, or by kernels that send each once to a host.

all-to-all   a row for each of a token's k experts, to ranks that are equally often theirs
dispatch     a token goes once to each host that has one of its experts, by the cards, and from there once to each of
             its ranks, by NVLink; the two run beside one another.  Of n places k random experts are in
             n (1 - (1 - 1/n)^k).  What comes back is summed on the same way

Copies in the order of experts, and sums of what they give, are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.kernels.links import ALL_TO_ALL
from planner.extras.transformers.cluster import GpuCluster, by_data_sheet
from planner.extras.transformers.shape import ExpertExchange, ParallelDegrees

ACROSS_S = 0.27e-3
OF_CARD = 0.9
"""Latency of a dispatch across hosts, and what it gets of a card: kernels of HybridEP on 16, 32 and 64 H100, tokens of
1 and 2 bytes a number, there and back (github.com/deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md): nine
times within -16 and +6 %.  DeepEP's own: 0.87 to 0.92 of it (README.md, docs/legacy.md)."""
WITHIN_S = 0.08e-3
"""Of one within a host: HybridEP's kernels on 8 B200 by 1 and 2 bytes a number (ibid.).  Its rate is taken as a ring's:
0.82 of NVLink's there, 0.77 on H800 (docs/legacy.md), 0.75 on H20 (DeepEP, issue 16); by tables 0.81 on H100."""
PLANNED_S = 0.2e-3 / 16
"""Of a rank, to tell one another what comes, once a pass: what calls of HybridEP take beyond their kernels and the
copies of what they receive, 0.2, 0.43 and 0.87 ms among 16, 32 and 64 ranks (ibid.)."""
TAKEN = 20 / 132
"""Of an H100's processors, those of the kernels of a dispatch (Megatron-LM, ``moe_deepep_num_sms``)."""


@dataclass(frozen=True, slots=True)
class ExpertRoute:
    """From the tokens of a rank to those of their experts.

    Attributes:
        num_bytes: of a rank's tokens.
        top_k: experts of a token.
    """

    cluster: GpuCluster
    ways: ParallelDegrees
    num_bytes: float
    top_k: int

    @property
    def sent(self) -> Estimate:
        """There, or back."""
        members = self.ways.expert
        stride = self.ways.expert_tensor
        if members == 1:
            return NOTHING
        if self.ways.expert_exchange is ExpertExchange.ALL_TO_ALL:
            return self.cluster.exchange(ALL_TO_ALL, self.num_bytes * self.top_k, members, stride)
        on_host = min(members, max(1, self.cluster.per_host // stride))
        hosts = -(-members // on_host)
        inside_s = self.cluster.ring_s(self.num_bytes * self._places(members), on_host, stride)
        if hosts == 1:
            return by_data_sheet(WITHIN_S + inside_s)
        away = self.num_bytes * self._places(hosts) * (hosts - 1) / hosts
        card = OF_CARD * self.cluster.across.bytes_per_s / self.cluster.per_host
        return by_data_sheet(ACROSS_S + max(inside_s, away / card))

    @property
    def planned(self) -> Estimate:
        """Before the dispatch of a forward; its backward goes the same ways."""
        if self.ways.expert == 1 or self.ways.expert_exchange is ExpertExchange.ALL_TO_ALL:
            return NOTHING
        return by_data_sheet(PLANNED_S * self.ways.expert)

    def waited_s(self, beside_s: float) -> float:
        """What a pass of ``beside_s`` grows by, with one exchange beside it."""
        if self.ways.expert_exchange is ExpertExchange.ALL_TO_ALL:
            return self.cluster.waited_s(self.sent, beside_s, self.ways.expert, self.ways.expert_tensor)
        return max(self.sent.seconds - beside_s, TAKEN * self.sent.seconds)

    def _places(self, number: int) -> float:
        """Of so many places those that a token goes to."""
        return number * (1 - (1 - 1 / number) ** self.top_k)
