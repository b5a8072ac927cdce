"""Split backward: I is one ordinary backward pass, W runs the weight-gradient products it left behind.

gradients: the one place where `.grad` of a parameter is read and written
vectors: gradients of norms and biases, added together after each backward pass
products: one weight-gradient product, dW += dy^T x
store: the products that wait for their W
ops: deferred products as operators that torch.compile does not look into
linear: `defer` replaces linear layers by layers that leave their weight gradient to W
float8: linear layers whose products are computed in float8
embedding: embeddings whose gradient is added row by row
stacks: products with a stack of weights, one for each expert
experts: transformers' mixture-of-experts layers; expert_rows: rows of tokens sorted by expert
expert_adapters: LoRA adapters on stacks of experts
divided_experts: experts on several processes, and the `exchange` of rows between them
exchange_times: when exchanges start and end, for the recorder
turns: two computations that take turns while messages are under way, with the times of `turn_times`
gated: gated experts of other frameworks, registered by `zeropipe.integrations`
splitters: B, I and W as the engine calls them
"""
