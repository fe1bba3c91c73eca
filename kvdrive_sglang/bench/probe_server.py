"""SGLang's HTTP server with a probe in its scheduler: ``python -m kvdrive_sglang.bench.probe_server <its flags>``."""

from __future__ import annotations

import os
import sys

from kvdrive_sglang.bench.probe import register_dense, run_scheduler


def main() -> None:
    """Run the server on the flags of the command line."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    register_dense()
    server_args = prepare_server_args(sys.argv[1:])
    server_args.resolve_once()
    try:
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
