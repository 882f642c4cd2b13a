"""How much rank each layer gets: methods, rules, and budgets that all layers share."""
