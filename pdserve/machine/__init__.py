"""What processes of this machine share: its cores, its memory and its file systems."""
