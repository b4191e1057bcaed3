"""The Transformers modelling backend of Modelbay."""
