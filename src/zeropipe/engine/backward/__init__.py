"""Split backward: I is one ordinary backward pass, W runs the weight-gradient products it left behind.

gradients: the one place where `.grad` of a parameter is read and written
products: one weight-gradient product, dW += dy^T x
store: the products that wait for their W
ops: deferred products as operators that torch.compile does not look into
linear: `defer` replaces linear layers by layers that leave their weight gradient to W
stacks: products with a stack of weights, one for each expert
experts: transformers' mixture-of-experts layers
gated: gated experts of other frameworks, registered by `zeropipe.integrations`
splitters: B, I and W as the engine calls them
"""
