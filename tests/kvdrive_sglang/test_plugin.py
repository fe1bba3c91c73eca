"""The plugin's entry point, where it does more than register."""

import multiprocessing
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvdrive_sglang.plugin import end_with_parent


def test_a_process_with_a_parent_goes_on() -> None:
    assert multiprocessing.parent_process() is None
    end_with_parent()
    process = multiprocessing.get_context("spawn").Process(target=end_with_parent)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.crash
def test_a_process_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    """The parent ends without waiting, as one that is killed does; its child looks for it afterwards."""
    (tmp_path / "orphan.py").write_text(
        textwrap.dedent("""
            import os, sys
            from kvdrive_sglang.plugin import end_with_parent

            def live(parent, gone, survived):
                os.close(parent)
                os.read(gone, 1)  # until every copy of the other end is closed: the parent is gone
                while os.getppid() == int(sys.argv[1]):
                    pass
                end_with_parent()
                open(survived, "w").close()
        """)
    )
    (tmp_path / "parent.py").write_text(
        textwrap.dedent("""
            import multiprocessing, os, sys
            from orphan import live

            if __name__ == "__main__":
                sys.argv[1:] = [str(os.getpid())]
                read, write = os.pipe()
                process = multiprocessing.get_context("fork").Process(
                    target=live, args=(write, read, "survived")
                )
                process.start()
                os._exit(1)
        """)
    )
    ended = subprocess.run(
        [sys.executable, "parent.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )  # its output ends with the last of the two
    assert (ended.returncode, ended.stderr) == (1, "")
    assert not (tmp_path / "survived").exists()
