"""Benchmarks behind `kvdrive bench NAME`; each module says what it measures and which outputs it checks first.

A module holds ``NAME``, ``SUMMARY_KEYS`` and ``run(full, progress) -> BenchResult`` (see ``report.py``).
"""
