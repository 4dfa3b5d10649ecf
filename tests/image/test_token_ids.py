"""Token ids: ints of any kind become one array, all else is refused with its value."""
import numpy as np
import pytest
import torch

from nanovllm.image.inputs import check_token_ids

VOCAB = 100


@pytest.mark.parametrize("ids", [
    [5, 6, 99], (5, 6, 99), np.array([5, 6, 99]), np.array([5, 6, 99], np.int32), np.array([5, 6, 99], np.uint8),
    torch.tensor([5, 6, 99]), torch.tensor([5, 6, 99], dtype=torch.int32), [np.int64(5), 6, np.uint16(99)],
    list(torch.tensor([5, 6, 99]))])
def test_token_ids_become_one_array(ids):
    checked = check_token_ids(ids, VOCAB)
    assert checked.dtype == np.int64 and checked.tolist() == [5, 6, 99]


def test_the_lowest_ids_are_no_bools():
    assert check_token_ids([1, np.int64(0), 0, 1], VOCAB).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2])])
def test_token_ids_are_a_copy(ids):
    checked = check_token_ids(ids, VOCAB)
    ids[0] = 5
    assert checked.tolist() == [1, 2]


@pytest.mark.parametrize("bad, names", [
    ([VOCAB], "token id 100 at index 0 .* 0 <= id < 100"), ([3, -1], "token id -1 at index 1"),
    ([2**40], str(2**40)), ([2**80], str(2**80)), (np.array([1, 2**40]), str(2**40)), (torch.tensor([-5]), "-5"),
    ([1.5], "1.5 at index 0 .* float"), ([1, 2.0], "2.0 at index 1"), (np.array([1.0, 2.0]), "float64"),
    (np.array([1], object), "object"),
    (torch.tensor([1.5]), "float32"), (torch.tensor([1.0], dtype=torch.bfloat16), "bfloat16"),
    ([True], "True at index 0"), ([1, np.True_], "True at index 1"), (np.array([True]), "bool"),
    (torch.tensor([True]), "bool"), ([torch.tensor(True)], "bool"), ([1, None], "None at index 1"),
    (["1"], "'1' at index 0"), ([[1, 2]], "list"), (torch.tensor([[1, 2]]), r"\(1, 2\)"), (np.array(3), r"\(\)"),
    ("12", "not str"), (b"12", "not bytes"), (7, "not int"), (None, "NoneType"), ({1: 2}, "dict"),
    ([], "empty"), ((), "empty"), (np.array([]), "empty"), (torch.tensor([]), "empty")])
def test_bad_token_ids_are_refused(bad, names):
    with pytest.raises(ValueError, match=names):
        check_token_ids(bad, VOCAB)
