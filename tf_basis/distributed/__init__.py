"""Training on several processes: quantised exchange of gradients."""
