"""From logits to tokens: penalties, grammar masks, top-k and top-p, Gumbel sampling, log-probabilities."""
