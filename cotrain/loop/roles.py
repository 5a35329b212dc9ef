"""The roles of a run."""

from dataclasses import dataclass

from cotrain.actors.drafter import Drafter
from cotrain.actors.engines import RolloutEngines
from cotrain.actors.policy import Policy
from cotrain.actors.rewards import Rewards
from cotrain.loop.reactor import Reactor
from cotrain.loop.validation import Validation
from cotrain.publish.publisher import Publisher
from cotrain.transport.nodes import Nodes
from cotrain.weights.versions import CurrentWeights


@dataclass
class Roles:
    """The roles of a run, and the nodes that they run on.

    `drafter` and `publisher` are None without speculation. A frozen drafter also has a trainer, which only scores it.
    """

    engines: RolloutEngines
    rewards: list[Rewards]
    policy: Policy
    drafter: Drafter | None
    publisher: Publisher | None
    reactor: Reactor
    nodes: Nodes
    current: CurrentWeights
    validation: Validation | None = None
