"""The program `kvdrive` as ``python -m kvdrive_sglang``."""

from kvdrive_sglang.cli.main import main

main()
