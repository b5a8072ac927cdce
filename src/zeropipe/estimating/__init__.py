"""Estimates: the costs of a model's layers on a GPU, from the shapes of the layers.

estimate   `zp.estimate`: a model and a GPU -> LayerCosts
gpus       data sheets of GPUs, and the fraction of each number that is reached
families   model types: what their configs leave out
shapes     a config.json -> the shape of a model
operators  a shape -> the operators of each kind of layer
counted    models of other types: their operators are counted
head       the fused head
count      counting: layers run on the meta device, and every operator is recorded
model      ShapedModel and CountedModel behind one protocol
adapters   LoRA: frozen weights, and the operators of adapters
price      operators -> seconds and bytes
"""
