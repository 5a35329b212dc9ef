"""The weights that all engines serve. This imports no torch."""

from collections.abc import Iterable

from cotrain.records import Versions, WeightPayload


class CurrentWeights:
    """The one holder of the versions in force, in the process that drives the engines.

    Whoever sends weights to the engines records them here as soon as all engines serve them; everybody else only reads. Each
    engine keeps its own stamp besides (RolloutEngine.versions), and `earlier` is what the stamps may say.
    """

    def __init__(self, versions: Versions, max_policy_lag: int = 0):
        """versions: those that the engines start with. max_policy_lag: policy versions that rollouts may lag behind `versions`."""
        self.versions = versions
        self.policy: WeightPayload | None = None
        """The policy that was sent last; None while the engines serve what they have loaded."""
        self.drafter: WeightPayload | None = None  # the drafter that was sent last; None before
        self.earlier: set[Versions] = set()
        """Other versions that may have generated tokens of rollouts that are still to be seen; none without lag."""
        self._max_policy_lag = max_policy_lag

    def record_policy(self, payload: WeightPayload | None, version: int) -> None:
        """All engines serve this policy."""
        self.policy = payload
        self._replace(Versions(version, self.versions.drafter))

    def record_drafter(self, payload: WeightPayload | None, version: int) -> None:
        """All engines serve this drafter."""
        self.drafter = payload
        self._replace(Versions(self.versions.policy, version))

    def record_attempt(self, version: int) -> None:
        """The engines are about to be sent a drafter: some may serve it for a moment, even if others refuse it."""
        if self._max_policy_lag:
            self.earlier.add(Versions(self.versions.policy, version))

    def observe(self, policy: int, earlier: Iterable[Versions]) -> None:
        """Follow engines whose policy a host updates: what they were seen to serve replaces what is known of it."""
        self.versions, self.earlier = Versions(policy, self.versions.drafter), set(earlier)

    def _replace(self, versions: Versions) -> None:
        if self._max_policy_lag:
            oldest = versions.policy - self._max_policy_lag
            self.earlier = {seen for seen in {*self.earlier, self.versions} if seen.policy >= oldest}
        self.versions = versions
