"""Update rules in pure TensorFlow: tensors in, tensors out, no variables, no Keras."""
