"""Two signals: finish and save, then stop; whatever the process is doing when they come."""

import io
import os
import signal
import time

import pytest

from cotrain.process.children import two_stage_stop


def test_the_first_signal_asks_and_the_second_ends():
    said = []
    before = signal.getsignal(signal.SIGINT)
    with two_stage_stop(said.append, "step") as requested:
        assert not requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert said == ["stopping after this step and saving; once more to stop at once"]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_in_the_middle_of_a_line_is_said_after_it():
    class Interrupted(io.RawIOBase):
        written = b""

        def writable(self):
            return True

        def write(self, data):
            if not self.written:
                os.kill(os.getpid(), signal.SIGINT)
            self.written += bytes(data)
            return len(data)

    raw = Interrupted()
    file = io.BufferedWriter(raw)

    def say(text):
        file.write(text.encode() + b"\n")
        file.flush()

    with two_stage_stop(say, "part"):
        say("a line")
        deadline = time.monotonic() + 5
        while b"stopping" not in raw.written and time.monotonic() < deadline:
            time.sleep(0.01)
    assert raw.written.startswith(b"a line\nstopping after this part")
