"""Parts that training does not need: each file or folder can be deleted. The rest imports them where it uses them."""
