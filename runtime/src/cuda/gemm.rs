//! Matrix products by cuBLASLt.
//!
//! Operands in bf16 or f16 are multiplied exactly and summed in f32; f32 operands are multiplied in
//! f32, never in TF32, so that plans can be compared. Operands in 8-bit floats are multiplied by their scales; the
//! sums of their products are kept in fewer bits where both are activations or weights (the library's fast
//! accumulation), and in f32 where one is a cotangent. A sum that is split into parts is put together in f32. A product
//! is described once ([`Problem`]) and then bound to an algorithm, when the program is loaded: the fastest that was
//! measured ([`super::tune`]), or the library's own first choice.

#![allow(unsafe_code)]

mod configuration;

pub use configuration::Configuration;
use configuration::REDUCTION;

use super::device::Failure;
use super::kernel::Arg;
use super::select::{Gemm, Matrix};
use cudarc::cublaslt::{result, sys};
use shardc_ir::DType;
use shardc_ir::ops::Epilogue;
use std::ffi::c_void;

/// How the parts of a sum that is split may be put together: in the type of the sum, if it is split at all.
const REDUCTIONS: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32 | REDUCTION;

/// The library, for one thread and device.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
}

/// How the library computes a product: its own description, opaque and of one version of the library.
pub type Algorithm = [u64; 8];

/// A product that is described to the library, at known addresses.
pub struct Problem {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    /// Of the operands, the result, and what is added to it.
    addresses: [u64; 4],
    /// Its address and bytes.
    workspace: (u64, u64),
    beta: f32,
    /// The first byte and the bytes of all that is read: the matrices, their scales, a bias, what is added.
    pub operands: Vec<(u64, u64)>,
    /// The same of the result, and of what the epilogue writes or reads beside it.
    pub results: Vec<(u64, u64)>,
    /// Of the results.
    pub dtype: DType,
    /// Whether the matrices are in 8-bit floats.
    pub is_f8: bool,
    /// All on which the speed of an algorithm depends, in words.
    pub key: String,
    /// Arithmetic operations.
    pub flops: f64,
}

/// A product whose algorithm is chosen.
pub struct ReadyGemm {
    problem: Problem,
    algorithm: Algorithm,
}

fn says(what: &'static str) -> impl Fn(result::CublasError) -> Failure {
    move |error| format!("cuBLASLt, {what}: {:?}", error.0)
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType, Failure> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::F8e4m3 => Ok(sys::cudaDataType::CUDA_R_8F_E4M3),
        DType::F8e5m2 => Ok(sys::cudaDataType::CUDA_R_8F_E5M2),
        other => Err(format!("no matrix product of {other}")),
    }
}

/// A row-major `[rows, columns]` matrix as cuBLASLt's column-major one: its transpose.
struct Seen {
    matrix: Matrix,
    rows: u64,
    columns: u64,
    leading: u64,
    transposed: bool,
}

impl Seen {
    /// How `matrix`, `[rows, columns]`, looks where its transpose is wanted.
    fn new(matrix: Matrix, rows: u64, columns: u64) -> Self {
        if matrix.column == 1 {
            Self { matrix, rows: columns, columns: rows, leading: matrix.row.max(columns), transposed: false }
        } else {
            Self { matrix, rows, columns, leading: matrix.column.max(rows), transposed: true }
        }
    }

    /// The bytes from the first of a batch of matrices to the end of the last one.
    fn bytes(&self, batch: u64) -> u64 {
        let elements = (batch - 1) * self.matrix.batch + self.columns.saturating_sub(1) * self.leading + self.rows;
        elements * self.matrix.dtype.size()
    }

    /// `bf16[4096,2048]/2048+0@256`, with a `t` where it is transposed: type, size, distance of columns and of
    /// matrices, and the alignment of the first byte.
    fn text(&self, at: u64) -> String {
        let transposed = if self.transposed { "t" } else { "" };
        let Self { matrix: Matrix { dtype, batch, .. }, rows, columns, leading, .. } = self;
        format!("{dtype}[{rows},{columns}]{transposed}/{leading}+{batch}@{}", alignment(at))
    }

    /// The library's description of a batch of them.
    fn layout(&self, batch: u64) -> Result<sys::cublasLtMatrixLayout_t, Failure> {
        let Self { matrix, rows, columns, leading, .. } = *self;
        let layout = result::create_matrix_layout(data_type(matrix.dtype)?, rows, columns, leading as i64)
            .map_err(says("layout"))?;
        use sys::cublasLtMatrixLayoutAttribute_t as L;
        let (count, stride) = (batch as i32, matrix.batch as i64);
        set_layout(layout, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
        set_layout(layout, L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride)?;
        Ok(layout)
    }
}

/// The largest power of two, of at most 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// A product as the library is asked for it. It writes column-major: asked for is the transposed product, with the operands
/// swapped; where the result is column-major already, the plain one.
struct Asked<'a> {
    gemm: &'a Gemm,
    /// The operands.
    first: Seen,
    second: Seen,
    /// The result.
    target: Seen,
    /// The scales of the operands, of 8-bit floats.
    scales: Option<[Arg; 2]>,
}

impl<'a> Asked<'a> {
    fn of(gemm: &'a Gemm) -> Self {
        let flip = |matrix: Matrix| Matrix { row: matrix.column, column: matrix.row, ..matrix };
        let swap = gemm.c.column != 1;
        let (first, second, target, rows, columns) = match swap {
            false => (gemm.b, gemm.a, gemm.c, gemm.n, gemm.m),
            true => (flip(gemm.a), flip(gemm.b), flip(gemm.c), gemm.m, gemm.n),
        };
        Self {
            gemm,
            first: Seen::new(first, gemm.k, rows),
            second: Seen::new(second, columns, gemm.k),
            target: Seen { matrix: target, rows, columns, leading: target.row.max(rows), transposed: false },
            scales: gemm.scales.map(|[of_a, of_b]| if swap { [of_a, of_b] } else { [of_b, of_a] }),
        }
    }

    /// What the epilogue writes or reads beside the result.
    fn beside(&self) -> Option<Arg> {
        self.gemm.epilogue.and_then(|(_, beside)| beside)
    }

    /// What the library is to compute, but for where the matrices are.
    fn description(&self, resolve: &dyn Fn(Arg) -> u64) -> Result<sys::cublasLtMatmulDesc_t, Failure> {
        use sys::cublasLtMatmulDescAttributes_t as D;
        let Self { gemm, first, second, .. } = self;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(says("description"))?;
        for (attribute, seen) in [(D::CUBLASLT_MATMUL_DESC_TRANSA, first), (D::CUBLASLT_MATMUL_DESC_TRANSB, second)] {
            // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
            set_description(description, attribute, &i32::from(seen.transposed))?;
        }
        if let Some([of_first, of_second]) = self.scales {
            set_description(description, D::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &resolve(of_first))?;
            set_description(description, D::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &resolve(of_second))?;
            let is_fast = [first, second].iter().all(|seen| seen.matrix.dtype == DType::F8e4m3);
            set_description(description, D::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(is_fast))?;
        }
        if let Some(bias) = gemm.bias {
            // One element per row of the library's result, which is a column of ours; of its type.
            set_description(description, D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &resolve(bias))?;
        }
        use D::{
            CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE as BIAS, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE as AUX,
        };
        for (attribute, distance) in [BIAS, AUX].into_iter().zip(gemm.beside) {
            if gemm.batch > 1 && distance > 0 {
                set_description(description, attribute, &(distance as i64))?;
            }
        }
        if let Some(beside) = self.beside() {
            let leading = self.target.leading as i64;
            set_description(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &resolve(beside))?;
            set_description(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &leading)?;
        }
        if let Some(epilogue) = epilogue(gemm)? {
            set_description(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as i32))?;
        }
        Ok(description)
    }

    /// All on which the speed of an algorithm depends ([`Problem::key`]).
    fn key(&self, addresses: [u64; 4], workspace: u64, resolve: &dyn Fn(Arg) -> u64) -> String {
        let gemm = self.gemm;
        let operands = [&self.first, &self.second, &self.target];
        let mut words: Vec<String> = operands.iter().zip(addresses).map(|(seen, at)| seen.text(at)).collect();
        words.push(format!("x{} workspace {workspace}", gemm.batch));
        words.extend(gemm.addend.map(|_| format!("added to @{}", alignment(addresses[3]))));
        words.extend(gemm.epilogue.map(|(epilogue, _)| format!("{epilogue:?}")));
        words.extend(self.beside().map(|beside| format!("beside @{}", alignment(resolve(beside)))));
        words.extend(gemm.bias.map(|bias| format!("bias @{}", alignment(resolve(bias)))));
        words.join(" ")
    }

    /// The first byte and the bytes of all that is read, and of all that is written or lies beside it.
    fn extents(&self, addresses: [u64; 4], resolve: &dyn Fn(Arg) -> u64) -> [Vec<(u64, u64)>; 2] {
        let Self { gemm, first, second, target, .. } = self;
        let [at_first, at_second, at_target, at_addend] = addresses;
        let element = target.matrix.dtype.size();
        // Of a batch, from the first of its vectors or matrices to the end of the last one.
        let to_last = |distance: u64| (gemm.batch - 1) * distance * element;
        let bias_bytes = to_last(gemm.beside[0]) + target.rows * element;
        let beside_bytes = to_last(gemm.beside[1]) + target.bytes(1);
        let written = target.bytes(gemm.batch);
        let mut read = vec![(at_first, first.bytes(gemm.batch)), (at_second, second.bytes(gemm.batch))];
        read.extend(gemm.scales.into_iter().flatten().map(|scale| (resolve(scale), DType::F32.size())));
        read.extend(gemm.bias.map(|bias| (resolve(bias), bias_bytes)));
        read.extend(gemm.addend.map(|_| (at_addend, written)));
        let beside = self.beside().map(|beside| (resolve(beside), beside_bytes));
        [read, [(at_target, written)].into_iter().chain(beside).collect()]
    }
}

impl Blas {
    /// Opens the library for this thread's device.
    pub fn new() -> Result<Self, Failure> {
        Ok(Self { handle: result::create_handle().map_err(says("open"))? })
    }

    /// Describes a product to the library. `resolve` gives addresses; `workspace` is an address and bytes that
    /// nothing else uses while the product runs.
    pub fn describe(
        &self,
        gemm: &Gemm,
        workspace: (u64, u64),
        resolve: impl Fn(Arg) -> u64,
    ) -> Result<Problem, Failure> {
        let asked = Asked::of(gemm);
        let Asked { first, second, target, .. } = &asked;
        let layouts = [first.layout(gemm.batch)?, second.layout(gemm.batch)?, target.layout(gemm.batch)?];
        let [at_first, at_second, at_target] = [first, second, target].map(|seen| resolve(seen.matrix.at));
        let addresses = [at_first, at_second, at_target, gemm.addend.map_or(at_target, &resolve)];
        let [operands, results] = asked.extents(addresses, &resolve);
        Ok(Problem {
            description: asked.description(&resolve)?,
            layouts,
            addresses,
            workspace,
            beta: if gemm.addend.is_some() { 1.0 } else { 0.0 },
            operands,
            results,
            dtype: target.matrix.dtype,
            is_f8: gemm.scales.is_some(),
            key: asked.key(addresses, workspace.1, &resolve),
            flops: gemm.flops(),
        })
    }

    /// Up to `count` algorithms that fit, the library's first choice first.
    ///
    /// # Errors
    /// None that fits.
    pub fn candidates(&self, problem: &Problem, count: usize) -> Result<Vec<Algorithm>, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let owned = Preference(result::create_matmul_pref().map_err(says("preference"))?);
        let preference = owned.0;
        let set = |attribute, bytes: *const c_void, size| {
            // SAFETY: the preference is valid and the attribute has this size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, bytes, size) }.map_err(says("preference"))
        };
        let workspace = problem.workspace.1 as usize;
        set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&workspace).cast(), 8)?;
        let [a, b, d, c] = problem.addresses;
        let alignments = [
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ];
        // Neither reduction in place nor one in the type of the result: in 16 bits both round every part, and of results in
        // f32 those that are proposed instead are as fast or faster (`bench/HISTORY.md`).
        set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::ptr::from_ref(&REDUCTIONS).cast(), 4)?;
        for (attribute, address) in alignments {
            set(attribute, std::ptr::from_ref(&alignment(address)).cast(), 4)?;
        }
        // SAFETY: all zero bytes are a value of this plain structure.
        let mut found = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; count];
        let ([la, lb, lc], mut number) = (problem.layouts, 0);
        // SAFETY: all handles are valid and there is room for `count` results.
        let asked = unsafe {
            let (handle, out) = (self.handle, found.as_mut_ptr());
            let description = problem.description;
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                description,
                la,
                lb,
                lc,
                lc,
                preference,
                count as i32,
                out,
                &mut number,
            )
        };
        found.truncate(number.max(0) as usize);
        found.retain(|one| one.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        match asked.result() {
            Ok(()) if !found.is_empty() => Ok(found.into_iter().map(|one| one.algo.data).collect()),
            Ok(()) => Err(format!("cuBLASLt has no algorithm for {}", problem.key)),
            Err(error) => Err(format!("{} for {}", says("no algorithm")(error), problem.key)),
        }
    }

    /// Whether an algorithm computes a problem, on this device and within its workspace.
    pub fn fits(&self, problem: &Problem, algorithm: &Algorithm) -> bool {
        let algorithm = sys::cublasLtMatmulAlgo_t { data: *algorithm };
        let [la, lb, lc] = problem.layouts;
        // SAFETY: all handles are valid; all zero bytes are a value of the plain structure that is filled in.
        let (checked, needs) = unsafe {
            let mut needs = std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>();
            let (handle, description) = (self.handle, problem.description);
            let checked =
                sys::cublasLtMatmulAlgoCheck(handle, description, la, lb, lc, lc, &algorithm, &mut needs).result();
            (checked, needs)
        };
        checked.is_ok() && needs.workspaceSize as u64 <= problem.workspace.1
    }

    /// Binds a product to an algorithm: the given one if it fits, else the library's first choice.
    ///
    /// # Errors
    /// No algorithm that fits.
    pub fn bind(&self, problem: Problem, algorithm: Option<Algorithm>) -> Result<ReadyGemm, Failure> {
        let algorithm = match algorithm.filter(|algorithm| self.fits(&problem, algorithm)) {
            Some(algorithm) => algorithm,
            None => self.candidates(&problem, 1)?[0],
        };
        Ok(ReadyGemm { problem, algorithm })
    }

    /// Enqueues a product.
    pub fn launch(&self, ready: &ReadyGemm, stream: cudarc::driver::sys::CUstream) -> Result<(), Failure> {
        self.run(&ready.problem, &ready.algorithm, stream)
    }

    /// Enqueues a product by an algorithm.
    pub fn run(
        &self,
        problem: &Problem,
        algorithm: &Algorithm,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), Failure> {
        let [a, b, d, c] = problem.addresses;
        let alpha = 1.0f32;
        let [la, lb, lc] = problem.layouts;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: *algorithm };
        // SAFETY: layouts and algorithm were made for these addresses, which live as long as the
        // device; factors and algorithm are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                problem.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&problem.beta).cast(),
                a as *const c_void,
                la,
                b as *const c_void,
                lb,
                c as *const c_void,
                lc,
                d as *mut c_void,
                lc,
                &algorithm,
                problem.workspace.0 as *mut c_void,
                problem.workspace.1 as usize,
                stream.cast(),
            )
        }
        .map_err(says("product"))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once, on the thread whose device it was made for, which is dropped behind it.
        // An error cannot be helped.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The version of the library.
pub fn version() -> usize {
    // SAFETY: reads a number.
    unsafe { sys::cublasLtGetVersion() }
}

/// What an algorithm is asked for by.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by the library and destroyed once. Errors cannot be helped.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        // SAFETY: made by `describe` and destroyed once; the library has read them when a call returned.
        // Errors cannot be helped.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}

/// What the library is to do with the elements of a product.
fn epilogue(gemm: &Gemm) -> Result<Option<sys::cublasLtEpilogue_t>, Failure> {
    use sys::cublasLtEpilogue_t as E;
    Ok(match (gemm.epilogue, gemm.bias.is_some()) {
        (None, false) => None,
        (None, true) => Some(E::CUBLASLT_EPILOGUE_BIAS),
        (Some((Epilogue::GeluTanh, None)), false) => Some(E::CUBLASLT_EPILOGUE_GELU),
        (Some((Epilogue::GeluTanh, None)), true) => Some(E::CUBLASLT_EPILOGUE_GELU_BIAS),
        (Some((Epilogue::GeluTanh, Some(_))), false) => Some(E::CUBLASLT_EPILOGUE_GELU_AUX),
        (Some((Epilogue::GeluTanh, Some(_))), true) => Some(E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS),
        (Some((Epilogue::GeluTanhGrad, Some(_))), false) => Some(E::CUBLASLT_EPILOGUE_DGELU),
        (Some((other, _)), _) => return Err(format!("{other:?} with a bias, or at no place")),
    })
}

fn set_description<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), Failure> {
    let bytes = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the description is valid and the attribute has the size of `T`.
    unsafe { result::set_matmul_desc_attribute(description, attribute, bytes, size_of::<T>()) }
        .map_err(says("description"))
}

fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<(), Failure> {
    let bytes = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the layout is valid and the attribute has the size of `T`.
    unsafe { result::set_matrix_layout_attribute(layout, attribute, bytes, size_of::<T>()) }.map_err(says("layout"))
}
