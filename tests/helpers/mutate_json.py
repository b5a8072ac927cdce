"""JSON documents with one value replaced, for hypothesis."""

import copy
import json

from hypothesis import strategies as st


@st.composite
def mutated(draw, texts, values, nest=False):
    """One of `texts` with one value, at any depth, replaced by one of `values` (with `nest`: or by the document)."""
    data = json.loads(draw(st.sampled_from(texts)))
    container = data
    while True:
        key = draw(st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container))))
        if isinstance(container[key], dict | list) and container[key] and draw(st.booleans()):
            container = container[key]
            continue
        container[key] = draw(st.one_of(values, st.just(copy.deepcopy(data))) if nest else values)
        return json.dumps(data)
