"""`auto`: whatever the predictions, it ends with a delivery that is as good as the best."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import AutoDelivery

SECONDS = st.floats(0.01, 100)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=7))
def test_it_settles_on_one_that_is_no_slower_than_any_that_was_predicted_to_be_faster(pairs):
    predicted = {str(i): guess for i, (guess, _) in enumerate(pairs)}
    truth = {str(i): true for i, (_, true) in enumerate(pairs)}
    auto = AutoDelivery(predicted)
    tried = []
    for _ in range(6 * len(pairs)):
        tried.append(auto.choose())
        auto.observe(tried[-1], truth[tried[-1]])
    settled = tried[-1]
    assert set(tried[-len(pairs) :]) == {settled}
    for name in predicted:
        assert truth[settled] * 0.9 <= (truth[name] if name in tried else predicted[name])


def test_a_store_that_has_become_slow_is_left():
    auto = AutoDelivery({"storage": 1.0, "peer": 2.0})
    for seconds in (1.0, 1.0, 1.0, 9.0, 9.0):
        assert auto.choose() == "storage"
        auto.observe("storage", seconds)
    assert auto.choose() == "peer"
