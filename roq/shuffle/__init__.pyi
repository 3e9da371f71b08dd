from roq.shuffle.service import Shuffles as Shuffles
from roq.shuffle.service import open as open
from roq.shuffle.writer import Writer as Writer
