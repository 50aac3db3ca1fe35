"""``pdserve bench proxy``: clients that cost next to nothing, the proxies compared, and mock backends behind them."""
