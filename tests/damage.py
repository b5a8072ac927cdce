"""JSON documents with one thing exchanged, for hypothesis."""

import copy
import json

from hypothesis import strategies as st


@st.composite
def damaged(draw, texts, values, whole=False):
    """One of `texts` with one of its values, however deep, exchanged for one of `values` (or for a copy of it all)."""
    data = json.loads(draw(st.sampled_from(texts)))
    place = data
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        place[key] = draw(st.one_of(values, st.just(copy.deepcopy(data))) if whole else values)
        return json.dumps(data)
