"""What each rank of train.py does around its loop: what it is built of, where it begins and ends, what it reports."""
