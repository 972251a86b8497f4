//! What is stored once per parameter, and how the ranks that hold copies of it share that.

use crate::cluster::Cluster;
use crate::cost::collective::{self, Collective, Group};
use crate::fold::Class;
use crate::shard::family::{copy_axes, is_copy_axis, storage_axes};
use crate::shard::tensor::{Placed, Prepared};
use crate::shard::zero::{Parted, scattered, storage_dim};
use shardc_ir::ops::{Op, OpDef, Update};
use shardc_ir::{AxisId, Choice, Family, Mesh, Strategy, TensorType};
use std::collections::BTreeMap;

/// The ranks that hold copies of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// All of them.
    all: Group,
    /// Those that store one copy in parts.
    parts: Group,
    /// Those that store the same part.
    replicas: Group,
}

impl Copies {
    /// On a mesh, of a parameter that is divided over its expert axes, or of any other.
    fn new(mesh: &Mesh, cluster: &Cluster, is_expert: bool) -> Self {
        let holds = |axis: &AxisId| !(is_expert && mesh.axis(*axis).family == Family::Expert);
        let all: Vec<AxisId> = copy_axes(mesh).into_iter().filter(holds).collect();
        let parts: Vec<AxisId> = storage_axes(mesh, &Strategy::default()).into_iter().filter(holds).collect();
        let replicas: Vec<AxisId> = all.iter().copied().filter(|axis| !parts.contains(axis)).collect();
        let group = |axes: &[AxisId]| Group::new(mesh, axes, cluster);
        Self { all: group(&all), parts: group(&parts), replicas: group(&replicas) }
    }

    /// Seconds to sum gradients of so many bytes: to each rank's part, if there are parts, and that over
    /// the replicas.
    pub fn reduce(&self, zero: u64, bytes: f64, cluster: &Cluster) -> f64 {
        let run =
            |kind, bytes, group| if bytes > 0.0 { collective::seconds(kind, bytes, group, cluster).0 } else { 0.0 };
        if zero == 0 {
            return run(Collective::AllReduce, bytes, self.all);
        }
        let part = bytes / self.parts.size() as f64;
        run(Collective::ReduceScatter, bytes, self.parts) + run(Collective::AllReduce, part, self.replicas)
    }

    /// Seconds to gather what is so many bytes then.
    pub fn gather(&self, bytes: f64, cluster: &Cluster) -> f64 {
        if bytes > 0.0 { collective::seconds(Collective::AllGather, bytes, self.parts, cluster).0 } else { 0.0 }
    }
}

/// An amount per rank: where every copy is whole, and where copies are stored in parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Amount {
    /// With whole copies.
    pub whole: f64,
    /// With parts.
    pub part: f64,
}

impl Amount {
    /// Adds an amount of which each rank has this share.
    pub fn add(&mut self, amount: f64, share: f64) {
        self.whole += amount;
        self.part += amount * share;
    }

    /// The amount under a ZeRO stage.
    pub fn under(&self, zero: u64) -> f64 {
        if zero >= 1 { self.part } else { self.whole }
    }
}

/// What a rank holds through the step, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Parameters that only casts and the update read.
    pub masters: f64,
    /// What the passes read of parameters: casts, codes, and parameters without one.
    pub copies: f64,
    /// Optimizer state.
    pub state: f64,
    /// Gradients that the update reads, in f32.
    pub gradients: f64,
    /// Bytes of an element of a parameter as the passes read it.
    pub width: f64,
    /// The share of parameters that are in blocks.
    pub in_blocks: f64,
}

impl Held {
    /// A share of it.
    pub fn of_share(self, share: f64) -> Self {
        let Self { masters, copies, state, gradients, width, in_blocks } = self;
        let [masters, copies, state, gradients] = [masters, copies, state, gradients].map(|bytes| share * bytes);
        Self { masters, copies, state, gradients, width, in_blocks }
    }
}

/// A gradient of which each rank makes the part that it stores under ZeRO, of what all ranks have: see
/// [`shard::zero`](crate::shard::zero).
#[derive(Clone, Debug)]
pub struct Made {
    /// The class that makes it.
    pub maker: usize,
    /// Among how many ranks it is divided.
    pub ranks: u64,
    /// Bytes of each value that it is made of, once that is gathered.
    pub read: Vec<f64>,
}

/// The sums over all parameters, for one way to store them.
#[derive(Clone, Debug)]
pub struct Storage {
    /// The copies of parameters, and of those that tell experts apart on the expert axes.
    pub copies: [Copies; 2],
    /// How many data ranks store one copy, beside the ranks of all other axes that hold copies.
    inner: u64,
    /// Bytes of parameters.
    pub parameters: Amount,
    /// Bytes of optimizer state.
    pub state: Amount,
    /// Bytes of gradients.
    pub gradients: Amount,
    /// Of the bytes of parameters, those that are read without a cast.
    pub direct: Amount,
    /// Of the whole bytes of parameters, those in blocks.
    pub in_blocks: f64,
    /// Bytes of what is made of parameters and read in the loop: casts, and codes in 8 bits.
    pub copied: Amount,
    /// The whole bytes of parameters stored in parts that are read without a cast.
    pub bare: f64,
    /// Seconds of updates.
    pub update: Amount,
    /// Seconds of what is made of parameters, and of squares of gradients.
    pub once: Amount,
    /// Per class, among how many ranks which dimension of what it makes is divided.
    pub parts: Vec<Option<(u64, usize)>>,
    /// Per class of updates, how its gradients are made, if that is where they are stored.
    pub made: BTreeMap<usize, Made>,
    /// Bytes of gradients that are divided unevenly, by whether that is along their outermost dimension: then zeros are
    /// put behind them where they are made, else they are copied to where there are zeros.
    pub uneven: [f64; 2],
    /// Per class of updates whose gradients are divided along an inner dimension, the seconds in which kernels bring
    /// these into the order of the parts.
    pub turned: BTreeMap<usize, f64>,
}

impl Storage {
    /// No parameters yet, on a mesh that differs from the placed one at most in how data ranks store.
    pub fn new(mesh: &Mesh, cluster: &Cluster) -> Self {
        let inner = inner(mesh);
        let none = Amount::default();
        Self {
            copies: [false, true].map(|is_expert| Copies::new(mesh, cluster, is_expert)),
            inner,
            parameters: none,
            state: none,
            gradients: none,
            direct: none,
            in_blocks: 0.0,
            copied: none,
            bare: 0.0,
            update: none,
            once: none,
            parts: Vec::new(),
            made: BTreeMap::new(),
            uneven: [0.0; 2],
            turned: BTreeMap::new(),
        }
    }

    /// The number of copies of a parameter that nothing divides.
    pub fn ranks(&self) -> u64 {
        self.copies[0].all.size()
    }

    /// The share of a parameter that nothing divides which a rank stores under a ZeRO stage.
    pub fn share(&self, zero: u64) -> f64 {
        if zero >= 1 { 1.0 / self.copies[0].parts.size() as f64 } else { 1.0 }
    }

    /// What a rank holds through the step under a ZeRO stage.
    pub fn held(&self, zero: u64) -> Held {
        let direct = self.direct.under(zero);
        let is_cast = self.copied.whole > 0.0;
        Held {
            masters: self.parameters.under(zero) - direct,
            copies: if zero >= 3 { self.copied.part } else { self.copied.whole } + direct,
            state: self.state.under(zero),
            gradients: self.gradients.under(zero),
            width: if is_cast { 2.0 } else { 4.0 },
            in_blocks: self.in_blocks / self.parameters.whole.max(1.0),
        }
    }

    /// Among how many ranks that is divided which a class makes of parameters, or the gradient of which it reads, if it
    /// is, and how.
    pub fn among(&self, prepared: &Prepared<'_>, placed: &Placed<'_>, class: usize) -> Option<(u64, Parted)> {
        let (mesh, strategy) = (placed.mesh, &placed.strategies[class]);
        let ranks = Self::sharing(self.inner, mesh, strategy);
        let parted = stored_dim(prepared, class, (mesh, strategy), ranks)?;
        (ranks > 1).then_some((ranks, parted))
    }

    /// Finds the gradients that are made where they are stored. A part that ends with zeros is cut from what is made.
    pub fn find_made(&mut self, prepared: &Prepared<'_>, placed: &Placed<'_>) {
        let of = |(class, folded): (usize, &Class)| {
            let node = prepared.graph.node(folded.node);
            let gradient = node.op.update().map(|_| node.operands[Update::GRADIENT])?;
            let (ranks, parted) = self.among(prepared, placed, class).filter(|(_, parted)| parted.is_even)?;
            scattered(prepared.graph, gradient, parted.dim)?;
            let maker = prepared.folded.class[prepared.graph.value(gradient).def];
            let operands = &placed.local(prepared, maker, &placed.strategies[maker]).operands;
            let summed = placed.local(prepared, class, &placed.strategies[class]).operands[Update::GRADIENT];
            let read = operands.iter().map(|bytes| (bytes * ranks) as f64).collect();
            let is_less = operands.iter().sum::<u64>() * ranks < summed;
            (placed.microbatches == 1 && is_less).then_some((class, Made { maker, ranks, read }))
        };
        self.made = prepared.folded.classes.iter().enumerate().filter_map(of).collect();
        self.turned.retain(|class, _| !self.made.contains_key(class));
    }

    /// How many data ranks store one copy.
    pub fn inner(&self) -> u64 {
        self.inner
    }

    /// Among how many ranks a value is stored at the most that is computed with under a strategy, if `inner` data
    /// ranks store one copy.
    pub fn sharing(inner: u64, mesh: &Mesh, strategy: &Strategy) -> u64 {
        let inside = |axis: &AxisId| {
            is_copy_axis(mesh, *axis)
                && !matches!(mesh.axis(*axis).family, Family::Data | Family::Fsdp)
                && strategy.choice(*axis) == Choice::Replicate
        };
        inner * mesh.extent(mesh.ids().filter(inside))
    }
}

/// How many data ranks store one copy on a mesh: those of the inner of two axes, if there are two.
pub fn inner(mesh: &Mesh) -> u64 {
    if mesh.family(Family::Fsdp).is_empty() { mesh.degree(Family::Data) } else { mesh.degree(Family::Fsdp) }
}

/// Of [`Storage::copies`], which those of a class are.
pub fn kind(placed: &Placed<'_>, class: usize) -> usize {
    kind_under(placed.mesh, &placed.strategies[class])
}

/// The same of what is computed with under a strategy.
pub fn kind_under(mesh: &Mesh, strategy: &Strategy) -> usize {
    usize::from(mesh.family(Family::Expert).into_iter().any(|axis| strategy.choice(axis) != Choice::Replicate))
}

/// The global type of what a class makes of parameters, or of the gradient that it reads.
pub fn stored_type<'a>(prepared: &'a Prepared<'_>, class: usize) -> &'a TensorType {
    let node = prepared.graph.node(prepared.folded.classes[class].node);
    let is_square = matches!(node.op, Op::SumSquares(_));
    prepared.graph.ty(if is_square { node.operands[0] } else { node.results[0] })
}

/// How so many ranks divide that to store it, if a class does so with the rest of the mesh. What is
/// made of a cast in 8 bits is stored as that is, if the parts are whole groups.
pub fn stored_dim(
    prepared: &Prepared<'_>,
    class: usize,
    (mesh, strategy): (&Mesh, &Strategy),
    ranks: u64,
) -> Option<Parted> {
    let (Op::QuantizationScale(_) | Op::Quantize(_)) = prepared.op(class) else {
        return storage_dim(stored_type(prepared, class), strategy, mesh, ranks, 1);
    };
    let rule = prepared.rules[class];
    let part = |factor: &usize| rule.factors[*factor].size / mesh.extent(strategy.axes(*factor).iter().copied());
    let groups = rule.operands[0].iter().map(|factors| factors.first().map_or(0, part)).enumerate();
    groups.filter_map(|(dim, groups)| Parted::new(dim, groups, ranks)).find(|parted| parted.is_even)
}
