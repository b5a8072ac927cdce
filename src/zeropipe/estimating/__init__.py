"""What a model costs on a GPU, from the shapes of its layers: shapes, operators, GPUs, prices."""
