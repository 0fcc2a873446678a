stands in for a model
