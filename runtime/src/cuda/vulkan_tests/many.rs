//! What is done to many tensors in one launch.

use super::*;

#[test]
fn many_small_tensors_at_once() {
    let Some(client) = client() else { return };
    let sizes = [[36, 1], [8, 8], [7, 3], [300, 100], [1, 1], [16, 12]];
    // Of two widths of vectors.
    let all: Vec<TensorType> = (0..22).map(|index| t(&sizes[index % sizes.len()])).collect();
    let count = all.len();
    let squares = Each { count, op: Box::new(SumSquares {}.into()) };
    check(&client, squares, &all, &vec![t(&[]); count], 1);
    check(&client, Each { count, op: Box::new(Cast {}.into()) }, &all, &all, 1);
    check(&client, Total {}, &vec![t(&[]); 150], &[t(&[])], 1);
    for terms in [2, 3, 70] {
        check(&client, Total {}, &vec![t(&[40, 30]); terms], &[t(&[40, 30])], 1);
    }
    check(&client, Total {}, &vec![t(&[5]); 9], &[t(&[5])], 1);
    let (mut operands, mut types) = (Vec::new(), Vec::new());
    for (index, ty) in all.iter().enumerate() {
        let mut values: Vec<HostTensor> = (0..4).map(|at| tensor(ty, 4 * index as u64 + at + 1, 1)).collect();
        // The second moment is a sum of squares.
        let positive: Vec<f32> = floats(&values[3]).iter().map(|value| value * value).collect();
        values[3] = HostTensor::from_f32(ty.shape.clone(), &positive);
        values.extend([0.5, 0.01, 3.0].map(|value| HostTensor::from_f32([], &[value])));
        types.extend(values.iter().map(|value| value.ty.clone()));
        operands.extend(values);
    }
    for (cast, makes) in [(None, 3), (Some(DType::F32), 4)] {
        let update = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast };
        let results: Vec<TensorType> = all.iter().flat_map(|ty| vec![ty.clone(); makes]).collect();
        let op = Op::from(Each { count, op: Box::new(update.into()) });
        assert_eq!(op.infer(&types, &[]), Ok(results.clone()));
        let expected = compute_op(&op, &operands, &results).unwrap_or_else(|error| panic!("{error}"));
        for (actual, expected) in run(&client, &op, &operands, &results, u64::MAX).iter().zip(&expected) {
            let gap = floats(actual).iter().zip(floats(expected)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(gap < 2e-5, "{gap}");
        }
    }
}
