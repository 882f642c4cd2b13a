from sigmascope.ui.lbm_model import Recent


def test_what_was_used_lately_outlives_what_was_not() -> None:
    kept = Recent[str](limit_bytes=20)
    kept.put("a", "A", size_bytes=10)
    kept.put("b", "B", size_bytes=10)
    assert kept.get("a") == "A"
    kept.put("c", "C", size_bytes=10)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("A", None, "C")


def test_a_value_put_again_counts_once() -> None:
    kept = Recent[str](limit_bytes=20)
    kept.put("b", "B", size_bytes=10)
    for _ in range(5):
        kept.put("a", "A", size_bytes=10)
    assert (kept.get("a"), kept.get("b")) == ("A", "B")


def test_the_newest_stays_though_it_is_larger_than_all_room() -> None:
    kept = Recent[str](limit_bytes=20)
    kept.put("small", "s", size_bytes=1)
    kept.put("large", "L", size_bytes=1000)
    assert (kept.get("small"), kept.get("large"), len(kept)) == (None, "L", 1)
