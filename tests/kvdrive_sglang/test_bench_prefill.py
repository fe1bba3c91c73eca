"""What the summary makes of the rounds."""

from kvdrive_sglang.bench.prefill import SUMMARY_KEYS, result_of


def test_the_summary_holds_ratios_of_medians() -> None:
    took = {
        "bare": [4.0, 5.0, 9.0],
        "indexed": [5.0, 5.5, 5.2],
        "sealed": [6.0, 5.5, 5.0],
        "torch_native": [10.0, 11.0, 12.0],
    }
    result = result_of(took, [0.2, 0.1, 0.4], 1000)
    assert set(result.summary) == set(SUMMARY_KEYS)
    assert result.summary["prefill_sealed_over_bare"] == 5.5 / 5.0
    assert result.summary["prefill_sealed_over_native"] == 0.5
    by_name = {row["prefill"]: row for row in result.rows}
    assert by_name["bare"]["tokens_per_s"] == 800
    assert (by_name["sealed"]["sealed_after_s"], by_name["indexed"]["sealed_after_s"]) == (0.2, None)
