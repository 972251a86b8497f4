//! The largest elements of rows, and running sums.

use super::*;

#[test]
fn largest_elements_and_running_sums() {
    let Some(client) = client() else { return };
    // Of equal numbers, of which there are many where they are few, the first.
    for (row, k, numbers) in [(8, 2, 4), (5, 5, 4), (200, 3, 1 << 20), (1500, 4, 9)] {
        let steps = tensor(&ids(&[7 * row]), 3, numbers).bytes;
        let values = steps.chunks_exact(4).map(|at| i32::from_le_bytes(at.try_into().unwrap()) as f32 - 2.0);
        let x = HostTensor { ty: t(&[7, row]), bytes: values.flat_map(f32::to_le_bytes).collect() };
        let op = Op::from(TopK { k });
        let expected = compute_op(&op, &[x.clone()], &[t(&[7, k]), ids(&[7, k]).with_dtype(DType::I64)]).unwrap();
        let actual = run(&client, &op, &[x], &[t(&[7, k]), ids(&[7, k])], u64::MAX);
        let narrow: Vec<u8> = expected[1].bytes.chunks_exact(8).flat_map(|index| index[..4].to_vec()).collect();
        assert_eq!([&actual[0].bytes, &actual[1].bytes], [&expected[0].bytes, &narrow]);
    }
    for (shape, dim) in [([3, 96, 5], 1), ([3, 13, 5], 1), ([2, 4, 1024], 2), ([64, 6, 2], 0)] {
        for reverse in [false, true] {
            check(&client, Cumsum { dim, reverse }, &[t(&shape)], &[t(&shape)], 1);
        }
    }
}
