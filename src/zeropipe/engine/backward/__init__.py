"""Split backward: I is one ordinary backward pass, W runs the weight-gradient products it left behind."""
