"""The mixture of experts that stands for the MLP in a Qwen3-Next layer, on packed rows. R rows, H hidden size."""

from torch import Tensor, nn

from drafters.attention import MLP
from drafters.target import Experts


class SparseMLP(nn.Module):
    """Each row goes through its likeliest experts, weighted by the router, and through one that all rows share."""

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.routing = experts
        self.gate = nn.Linear(hidden_size, experts.number, bias=False)
        self.experts = nn.ModuleList([MLP(hidden_size, experts.size) for _ in range(experts.number)])
        self.shared_expert = MLP(hidden_size, experts.shared_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] from [R, H]."""
        weights, chosen = self.gate(x).softmax(-1).topk(self.routing.per_token, dim=-1)
        if self.routing.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        output = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                output = output.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return output
