"""A task set of verifiers with a tool and a user who asks again: sums."""

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTaskConfig(vf.TaskConfig):
    tools: bool = True


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Adding(vf.ToolsetConfig())] if config.tools else []

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last turn has the answer."""
        return float(self.data.answer in trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    limit: int = 8


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(self.config.limit):
            yield SumTask(SumData(prompt=f"{number} + 7?", answer=str(number + 7)), self.config.task)


class AskingConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    times: int = 3


class Asking(vf.Env[AskingConfig]):
    """A user who asks again, whatever the solver says."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as interaction:
            segment = await interaction.turn()
            for time in range(1, self.config.times):
                if segment.terminated:
                    break
                segment = await interaction.turn(f"Sure? ({time})")


__all__ = ["Asking", "Sums"]

if __name__ == "__main__":
    Adding.run()
