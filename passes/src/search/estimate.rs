//! Time and memory of one candidate: the closed form by which the search compares plans.
//!
//! A [`Shape`] holds what the tensor-parallel solution of one mesh needs, summed over the classes of the placed mesh:
//! seconds per microbatch and bytes per rank. ZeRO stages and recomputation are then arithmetic on it ([`predict`]), so
//! trying them is free.
//!
//! * *Kernels* are those that lowering makes of each node on one device ([`emitted`](crate::lower::emitted)).
//! * *Communication* runs beside them on two clocks, that of kernels and that of the wire ([`clocks`]). [`beside`]
//!   tells what of it shows, and what this form does not see.
//! * *Memory* follows every value through the step ([`liveness`]), and copies of parameters by where they are gathered
//!   and dropped ([`copies`]).
//! * *Recomputation* is chosen value by value ([`recompute`]). The peak of a choice is found from the few positions at
//!   which it changes anything ([`liveness::pieces`]).
//! * *Offloads* are priced by what they free and move ([`relief`]).
//!
//! The plan that is chosen is predicted by its programs instead ([`simulate`](crate::simulate)). A test holds the two
//! within 3% over plans of every family, and names those that are farther (`tests/tests/prediction.rs`).

pub mod beside;
pub(in crate::search) mod clocks;
pub(in crate::search) mod copies;
pub mod liveness;
mod predict;
pub mod recompute;
pub mod relief;
pub(in crate::search) mod split;
pub mod storage;
pub(in crate::search) mod summed;
pub(in crate::search) mod turns;

use super::choice::pins::Recompute;
use super::work::Work;
use crate::cluster::Cluster;
use crate::cost::{Bound, Machine, Pass};
use crate::fold::block_of;
use crate::shard::local::Local;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use crate::threads::lock;
use beside::{BUCKET, Loop, Times};
use copies::Keeping;
use liveness::pieces::Profile;
use liveness::{Gradients, Liveness, Peak};
use recompute::{Menu, Prices, Selected};
use shardc_ir::ops::{Op, OpDef, Update};
use shardc_ir::program::Action;
use shardc_ir::{DType, Family, Mesh, NodeId, ReduceKind, Role, TensorType};
use split::Split;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};
use storage::{Held, Storage};
use summed::Adding;
use turns::{beside_kernels, converted_once, is_in_pass};

/// The sums of one placed mesh: seconds, and bytes per rank.
pub struct Shape<'a> {
    /// A microbatch's passes, without recomputation.
    forward: Split,
    backward: Split,
    /// What can be recomputed.
    menu: OnceLock<Menu>,
    prepared: &'a Prepared<'a>,
    /// Per class, what one of its nodes takes, with its changes of layout.
    prices: Vec<Split>,
    /// Per class, by how many seconds one takes longer where the gradients of weights are a pass of their own.
    apart: Vec<f64>,
    /// Per class, the share of `prices` that makes copies in another layout which several nodes read.
    copies: Vec<Split>,
    /// Per class, the bytes of what is made of the parameter of one of its nodes and kept through the loop.
    copied: Vec<f64>,
    /// Per class that makes something of a parameter, its share of what the loop reads of that.
    divided: Vec<f64>,
    /// Once per step: what is neither in the loop nor the update.
    once: Split,
    /// What is stored, for each way to store it.
    storages: Vec<Storage>,
    /// What it takes to add whole gradients up over microbatches.
    adding: Adding,
    /// Bytes of the largest gradient in the blocks.
    block_gradient: u64,
    /// Seconds saved where each rank makes only its part of a gradient.
    saved: f64,
    /// The seconds of `once` in which weights change their layout along the tensor axes.
    turned: f64,
    /// Blocks of the model.
    pub blocks: u64,
    /// By how many seconds of a step the last rank takes longer than others in causal attention, unless tokens are in
    /// chunks.
    pub uneven: f64,
    /// Into how many chunks the head and its loss are cut.
    pub loss_chunks: u64,
    /// By how many seconds nodes of the head take longer in chunks than whole.
    longer: BTreeMap<NodeId, f64>,
    liveness: Liveness<'a>,
    /// The peaks that were found so far.
    peaks: Mutex<BTreeMap<(Recompute, u64, usize), Peak>>,
    /// What peaks are found from.
    profiles: Mutex<BTreeMap<(u64, usize), Profile>>,
    /// The stages of the mesh.
    stages: u64,
    /// The largest copy made for one conversion: in stages, of those in the loop, since all else is done before the
    /// first microbatch is held.
    largest_copy: u64,
    /// By how much it is larger than all that have nothing to do with the head.
    head_copy: u64,
    microbatches: u64,
    /// The loop over microbatches as communication sees it, and for each way to store parameters the seconds of
    /// collectives over data ranks.
    around: Loop,
    times: Vec<OnceLock<Times>>,
    /// Per way to store parameters, the seconds of exposed communication without recomputation.
    bare: Mutex<BTreeMap<(usize, u64), f64>>,
}

impl<'a> Shape<'a> {
    /// Sums a placed mesh up, with the head in so many chunks. `meshes` are the same with the data ranks as
    /// one axis or as replicas of several that store parameters in parts: one for each way to store them.
    pub fn new(
        prepared: &'a Prepared<'a>,
        placed: &Placed<'_>,
        conversions: &[Conversion],
        loss_chunks: u64,
        meshes: &[Mesh],
    ) -> Self {
        let stages = placed.mesh.degree(Family::Pipeline);
        let is_staged = stages > 1;
        let copies = conversions.iter().filter(|of| !is_staged || is_in_pass(prepared, placed, of));
        let largest = |of: &dyn Fn(&Conversion) -> bool| {
            copies.clone().filter(|conversion| of(conversion)).map(|of| of.bytes as u64).max().unwrap_or(0)
        };
        let nodes = prepared.head.iter().flat_map(|head| head.nodes());
        let head: Vec<usize> = nodes.map(|(id, _)| prepared.folded.class[id]).collect();
        let is_of_head = |class: usize| head.contains(&class);
        let mut shape = Self {
            forward: Split::default(),
            backward: Split::default(),
            menu: OnceLock::new(),
            prepared,
            prices: Vec::new(),
            apart: vec![0.0; prepared.rules.len()],
            adding: Adding::new(prepared.rules.len()),
            copies: vec![Split::default(); prepared.rules.len()],
            copied: vec![0.0; prepared.rules.len()],
            divided: vec![1.0; prepared.rules.len()],
            once: Split::default(),
            storages: meshes.iter().map(|mesh| Storage::new(mesh, placed.cluster)).collect(),
            block_gradient: 0,
            saved: 0.0,
            turned: 0.0,
            blocks: prepared.block_count(),
            uneven: 0.0,
            loss_chunks,
            longer: BTreeMap::new(),
            liveness: Liveness::new(prepared, placed, conversions, loss_chunks),
            peaks: Mutex::default(),
            profiles: Mutex::default(),
            stages,
            largest_copy: largest(&|_| true),
            head_copy: largest(&|_| true) - largest(&|of| !is_of_head(of.maker) && !is_of_head(of.reader)),
            microbatches: placed.microbatches,
            around: Loop::default(),
            times: vec![OnceLock::new(); meshes.len()],
            bare: Mutex::default(),
        };
        // What is converted in between is made and read by instructions of their own.
        let mut is_apart = vec![false; prepared.rules.len()];
        conversions.iter().for_each(|conversion| is_apart[conversion.reader] = true);
        let mut seconds = Vec::new();
        let converted = converted_once(prepared, conversions);
        for (class, is_apart) in is_apart.into_iter().enumerate() {
            let (time, bound) = shape.add_class(prepared, placed, class, is_apart);
            shape.add_stored(prepared, placed, class, time, &converted);
            shape.prices.push(Split::of(time, bound));
            seconds.push(time);
        }
        shape.storages.iter_mut().for_each(|storage| storage.find_made(prepared, placed));
        let first = &shape.storages[0];
        let divides = |class: usize| Some(first.among(prepared, placed, class)?.1.dim);
        shape.around = Loop::new(prepared, placed, conversions, &seconds, &divides);
        shape.add_conversions(placed, beside_kernels(prepared, placed, conversions, &seconds));
        for made in shape.storages[0].made.values() {
            let members = prepared.folded.classes[made.maker].members.len() as f64;
            shape.saved += seconds[made.maker] * members * (1.0 - 1.0 / made.ranks as f64);
            shape.liveness.in_parts.push(made.maker);
        }
        shape.add_chunks(placed);
        shape.liveness.staging = shape.staging(conversions);
        if !is_staged && shape.storages[0].ranks() > 1 {
            shape.liveness.waiting = [shape.block_gradient, shape.waiting_in_loop(1)];
        }
        shape
    }

    /// Adds changes of layout, of which only what kernels do not hide is left ([`beside_kernels`]). Each comes with the
    /// seconds by which more shows where the gradients of weights are a pass of their own.
    fn add_conversions(&mut self, placed: &Placed<'_>, shown: Vec<(Conversion, f64)>) {
        let prepared = self.prepared;
        let (scales, others): (Vec<_>, Vec<_>) = shown.into_iter().partition(|(of, _)| prepared.is_scale(of.maker));
        // Scales of parameters are reduced together.
        self.once.communication += scales.iter().map(|(scale, _)| scale.turn.seconds()).fold(0.0, f64::max);
        // What is gathered of parameters in front of the loop starts once for each block.
        let is_merged = |of: &Conversion| prepared.is_merged(of.maker, of.reader);
        let starts = others.iter().map(|(of, _)| of).filter(|of| is_merged(of)).map(|of| of.start * of.count as f64);
        self.once.communication += starts.fold(0.0, f64::max);
        for (conversion, apart) in &others {
            let start = if is_merged(conversion) { conversion.start } else { 0.0 };
            let seconds = (conversion.turn.seconds() - start) * conversion.count as f64;
            let is_in_pass = is_in_pass(prepared, placed, conversion);
            self.part(prepared.role(conversion.reader), is_in_pass).communication += seconds;
            self.turned += if prepared.is_of_weight(conversion.maker, conversion.reader) { seconds } else { 0.0 };
            // What is converted once is no node's of a microbatch.
            if !is_in_pass {
                continue;
            }
            // Terms are added where they are made, and again where they are made again; so is a copy that several read.
            let class = if conversion.is_early || conversion.is_shared { conversion.maker } else { conversion.reader };
            let members = prepared.folded.classes[class].members.len() as f64;
            self.apart[class] += apart * conversion.count as f64 / members;
            self.prices[class].communication += seconds / members;
            if conversion.is_shared && !conversion.is_early {
                self.copies[class].communication += seconds / members;
            }
        }
    }

    /// The most bytes of gradients that wait on one of so many stages where they are reduced in the loop: two buckets, of
    /// which one fills while one is reduced. A large gradient is a bucket by itself.
    fn waiting_in_loop(&self, stages: u64) -> u64 {
        let whole = self.storages[0].gradients.whole as u64 / stages;
        whole.min(2 * self.block_gradient.max(BUCKET as u64))
    }

    /// Adds what the nodes of the head take longer in chunks than whole: products of fewer tokens, a start for each, and
    /// the sums over the tokens, which every chunk but the first reads and writes again.
    fn add_chunks(&mut self, placed: &Placed<'_>) {
        let (prepared, chunks) = (self.prepared, self.loss_chunks);
        let machine = Machine::own(&placed.cluster.device);
        for (id, tokens) in prepared.head.iter().filter(|_| chunks > 1).flat_map(|head| head.nodes()) {
            let class = prepared.folded.class[id];
            let (op, rule, pass) = (prepared.op(class), &prepared.rules[class], Pass::of(prepared.role(class)));
            let (operands, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
            let part = |(ty, dims): (&TensorType, &Vec<Vec<usize>>)| {
                let size = |(size, factors): (&u64, &Vec<usize>)| {
                    if *factors == [tokens] { size.div_ceil(chunks) } else { *size }
                };
                ty.with_shape(ty.shape.iter().zip(dims).map(size).collect::<Vec<u64>>())
            };
            let reads: Vec<TensorType> = operands.iter().zip(&rule.operands).map(part).collect();
            let makes: Vec<TensorType> = results.iter().zip(&rule.results).map(part).collect();
            let sums = makes.iter().zip(&results).filter(|(part, whole)| part == whole).map(|(sum, _)| sum.clone());
            let adds: Vec<TensorType> = reads.iter().cloned().chain(sums).collect();
            let seconds = |operands: &[TensorType], results: &[TensorType]| {
                let (alone, bound) = machine.seconds(op, operands, results, pass);
                (prepared.emitted[class].seconds(alone, bound, machine.launch(), false), bound)
            };
            let (whole, bound) = seconds(&operands, &results);
            let longer = seconds(&reads, &makes).0 + (chunks - 1) as f64 * seconds(&adds, &makes).0 - whole;
            self.backward.add(longer, bound);
            self.longer.insert(id, longer);
        }
    }

    /// The scratch memory of collectives that add: for sums between nodes, for gradients if every rank makes them whole,
    /// and for gradients if some are made in parts ([`Liveness::in_parts`]).
    fn staging(&self, conversions: &[Conversion]) -> [u64; 3] {
        let scratch = |bytes: u64| {
            let action = Action::ReduceScatter { reduce: ReduceKind::Sum, group: 0 };
            self.prepared.target.scratch(&action, &[TensorType::new(DType::F32, [bytes / 4])], &[]).0
        };
        let sizes = self.liveness.sizes();
        let sums = conversions.iter().filter(|of| of.is_early && !of.is_local);
        let alone = sums.map(|of| sizes[of.maker][of.result]).max().unwrap_or(0);
        let whole = self.storages[0].gradients.whole as u64;
        let gradients = |in_parts: &[usize]| {
            let makers = self.prepared.lives.gradients().filter(|(class, _)| !in_parts.contains(class));
            let largest = makers.map(|(class, result)| sizes[class][result]).max().unwrap_or(0);
            if self.storages[0].ranks() > 1 { self.bucket(whole).max(largest) } else { 0 }
        };
        [alone, gradients(&[]), gradients(&self.liveness.in_parts)].map(scratch)
    }

    /// Bytes of a bucket of gradients: a block's at most.
    fn bucket(&self, whole: u64) -> u64 {
        (BUCKET as u64).min(whole / self.blocks.max(1))
    }

    fn is_in_block(&self, prepared: &Prepared<'_>, class: usize) -> bool {
        let node = prepared.graph.node(prepared.folded.classes[class].node);
        block_of(prepared.graph, node).is_some()
    }

    /// The part of the step that something of a role belongs to, in the passes of a microbatch or not.
    fn part(&mut self, role: Role, is_in_pass: bool) -> &mut Split {
        match role {
            _ if !is_in_pass => &mut self.once,
            Role::Forward => &mut self.forward,
            _ => &mut self.backward,
        }
    }

    /// Adds what a class of nodes, each of which takes so many seconds, stores for each parameter; `converted` is what
    /// the loop reads of it in another layout.
    fn add_stored(
        &mut self,
        prepared: &Prepared<'_>,
        placed: &Placed<'_>,
        class: usize,
        each: f64,
        converted: &BTreeMap<(usize, usize), f64>,
    ) {
        let op = prepared.op(class);
        if prepared.lives.copies().is_beside(class) {
            let each = self.liveness.sizes()[class].iter().sum::<u64>() as f64;
            self.copied[class] = each;
            let bytes = each * prepared.folded.classes[class].members.len() as f64;
            self.storages.iter_mut().for_each(|storage| storage.copied.add(bytes, 1.0));
        }
        if !prepared.is_stored(class) {
            return;
        }
        let Local { operands, results, .. } = &*placed.local(prepared, class, &placed.strategies[class]);
        let count = prepared.folded.classes[class].members.len() as f64;
        let (bytes, seconds) = (|bytes: &u64| *bytes as f64 * count, each * count);
        // Of all that it makes, what the loop reads, and how much larger that is in other layouts.
        let (mut read, mut larger) = (0.0, 0.0);
        for result in (0..results.len()).filter(|result| prepared.lives.copies().is_read(class, *result)) {
            read += bytes(&results[result]);
            let converted = converted.get(&(class, result)).copied().unwrap_or(0.0);
            larger += (converted - bytes(&results[result])).max(0.0);
        }
        self.copied[class] = (larger + if prepared.is_copy(class) { read } else { 0.0 }) / count;
        if let (Some(made), Some(whole)) = (results.first(), self.liveness.sizes()[class].first()) {
            self.divided[class] = *made as f64 / (*whole).max(1) as f64;
        }
        let is_in_block = self.is_in_block(prepared, class);
        let machine = Machine::own(&placed.cluster.device);
        for storage in &mut self.storages {
            let parts = storage.among(prepared, placed, class);
            let share = parts.as_ref().map_or(1.0, |(_, parted)| parted.share);
            let uneven = parts.as_ref().filter(|(_, parted)| !parted.is_even).map(|(_, parted)| parted.dim == 0);
            let is_inner = parts.as_ref().is_some_and(|(_, parted)| parted.dim > 0);
            storage.parts.resize(prepared.rules.len(), None);
            storage.parts[class] = parts.map(|(ranks, parted)| (ranks, parted.dim));
            storage.copied.add(larger, share);
            match op {
                Op::Parameter(_) => {
                    storage.parameters.add(bytes(&results[0]), share);
                    storage.bare += if share < 1.0 { read } else { 0.0 };
                    storage.direct.add(read, share);
                    storage.in_blocks += if is_in_block { bytes(&results[0]) } else { 0.0 };
                }
                Op::State(_) => storage.state.add(bytes(&results[0]), share),
                op if op.update().is_some() => {
                    let gradient = bytes(&operands[Update::GRADIENT]);
                    storage.gradients.add(gradient, share);
                    uneven.iter().for_each(|is_outer| storage.uneven[usize::from(*is_outer)] += gradient);
                    storage.update.add(seconds, share);
                    if is_inner {
                        let turned = 2.0 * gradient / machine.bandwidth() + count * machine.launch();
                        storage.turned.insert(class, turned);
                    }
                }
                _ if prepared.is_copy(class) => {
                    storage.copied.add(read, share);
                    storage.once.add(seconds, share);
                }
                _ => storage.once.add(seconds, share),
            }
        }
    }

    /// Adds a class of nodes, of which nothing is merged into other instructions if they are `apart`; gives the
    /// seconds of one of them, and what bounds it.
    fn add_class(&mut self, prepared: &Prepared<'_>, placed: &Placed<'_>, class: usize, apart: bool) -> (f64, Bound) {
        let strategy = &placed.strategies[class];
        let local = placed.local(prepared, class, strategy);
        let Local { price, operands, .. } = &*local;
        let bound = price.bound;
        let op = prepared.op(class);
        let count = prepared.folded.classes[class].members.len() as u64;
        let each = local.emitted(prepared, (class, placed.cluster), apart);
        let seconds = each * count as f64;
        self.uneven += price.uneven * count as f64 * self.microbatches as f64;
        match op {
            op if op.update().is_some() => {
                let gradient = operands[Update::GRADIENT];
                self.adding.add(prepared, placed, (class, gradient));
                if self.is_in_block(prepared, class) {
                    self.block_gradient = self.block_gradient.max(gradient);
                }
            }
            Op::Parameter(_) | Op::State(_) => {}
            _ if prepared.is_copy(class) => {}
            Op::SumSquares(_) if !prepared.in_loop(class) => {}
            _ => self.part(prepared.role(class), prepared.in_loop(class)).add(seconds, bound),
        }
        (each, bound)
    }

    /// What one node of a class takes, with its conversions.
    pub fn each(&self, class: usize) -> Split {
        self.prices[class]
    }

    /// Seconds by which a node takes longer since the head is cut into chunks.
    pub fn longer(&self, id: NodeId) -> f64 {
        self.longer.get(&id).copied().unwrap_or(0.0)
    }

    /// Seconds by which one node of a class takes longer where the gradients of weights are a pass by themselves.
    pub fn apart(&self, class: usize) -> f64 {
        self.apart[class]
    }

    /// Bytes of buffers that only who has the head needs.
    pub fn head_copy(&self) -> u64 {
        self.head_copy
    }

    /// Bytes of what is made of a parameter by one node of a class, or of what it makes in another layout, and kept through
    /// the loop.
    pub fn copied(&self, class: usize) -> f64 {
        self.copied[class]
    }

    /// Seconds in which the gradient that one node of a class makes is added up, whole, over the microbatches of a
    /// stage, for each of them.
    pub fn adds(&self, class: usize) -> f64 {
        self.adding.each(class)
    }

    /// Whether gradients are added up in the parts in which they are stored.
    pub fn adds_parts(&self, storage: usize, zero: u64) -> bool {
        zero >= 2 && self.storages[storage].ranks() > 1
    }

    /// Bytes of each result of each class on one rank.
    pub fn sizes(&self) -> &[Vec<u64>] {
        self.liveness.sizes()
    }

    /// Bytes that a result of a class on one rank is behind the forward pass.
    pub fn kept(&self, class: usize, result: usize) -> u64 {
        let Liveness { sizes, grown, is_brief, .. } = &self.liveness;
        let of = |bytes: &[Vec<u64>]| bytes[class].get(result).copied().unwrap_or(0);
        of(sizes) - if is_brief[class] { of(grown) } else { 0 }
    }

    /// What can be computed again.
    pub fn menu(&self) -> &Menu {
        let Liveness { sizes, grown, is_brief, .. } = &self.liveness;
        let prices = Prices { seconds: &self.prices, copies: &self.copies, sizes, grown, is_brief };
        self.menu.get_or_init(|| Menu::new(self.prepared, prices))
    }

    fn select(&self, recompute: Recompute) -> Selected<'_> {
        if recompute == Recompute::None { Selected::default() } else { self.menu().select(recompute) }
    }

    /// The peak of a recomputation, which several stages of ZeRO share.
    fn peak(&self, recompute: Recompute, gradients: Gradients, storage: usize, zero: u64) -> Peak {
        let is_loop = self.microbatches > 1;
        let parts = if zero >= 1 { &self.storages[storage].parts[..] } else { &[] };
        let keeping = Keeping { parts, is_dropped: zero >= 3, is_loop };
        // Copies that live through all microbatches are no part of it.
        let (keeping, of_copies) = match zero {
            0..3 if is_loop => (None, 0),
            0 => (Some(keeping), 1),
            _ => (Some(keeping), 2 + 2 * storage + usize::from(zero >= 3)),
        };
        let of_gradients = match gradients {
            Gradients::Kept(share) => share.to_bits(),
            Gradients::Added { is_reduced } => u64::MAX - u64::from(is_reduced),
        };
        let find = || {
            let mut profiles = lock(&self.profiles);
            let profile = || self.liveness.profile(gradients, keeping);
            let profile = profiles.entry((of_gradients, of_copies)).or_insert_with(profile);
            profile.peak(&self.liveness, &self.select(recompute), keeping)
        };
        *lock(&self.peaks).entry((recompute, of_gradients, of_copies)).or_insert_with(find)
    }

    /// The share of a parameter that nothing divides which a rank stores.
    pub fn share(&self, storage: usize, zero: u64) -> f64 {
        self.storages[storage].share(zero)
    }

    /// The share that a rank stores of what is made of a parameter by a class, and read whole.
    pub fn share_of(&self, class: usize, storage: usize, zero: u64) -> f64 {
        let parts = self.storages[storage].parts.get(class).copied().flatten().filter(|_| zero >= 1);
        self.divided[class] * parts.map_or(1.0, |(ranks, _)| 1.0 / ranks as f64)
    }

    /// Seconds in which data ranks add up gradients of so many bytes.
    pub fn reduced(&self, storage: usize, zero: u64, bytes: f64, cluster: &Cluster) -> f64 {
        self.storages[storage].copies[0].reduce(zero, bytes, cluster)
    }

    /// What a rank holds through the step.
    pub fn held(&self, storage: usize, zero: u64) -> Held {
        self.storages[storage].held(zero)
    }

    /// Seconds of a microbatch's forward pass, and of its backward pass with recomputation.
    pub fn passes(&self, recompute: Recompute) -> [f64; 2] {
        let seconds = |split: Split| split.matmul + split.memory + split.communication;
        [seconds(self.forward), seconds(self.backward + self.select(recompute).cost())]
    }

    /// Seconds of a step that collectives of the tensor axes show.
    pub fn within(&self, recompute: Recompute) -> f64 {
        let again = self.select(recompute).cost();
        (self.forward.communication + self.backward.communication + again.communication) * self.microbatches as f64
    }

    /// Seconds of the passes of a microbatch, without what data ranks say to each other.
    pub fn pace(&self) -> f64 {
        (self.forward + self.backward).seconds()
    }

    /// Microbatches of a step.
    pub fn microbatches(&self) -> f64 {
        self.microbatches as f64
    }

    /// Whether gradients may leave the device as they are made: each rank has its part of their sum then.
    pub fn leaves_gradients(&self, index: usize, zero: u64) -> bool {
        self.storages[index].ranks() == 1 || zero >= 2 || (zero == 1 && self.microbatches == 1)
    }

    /// Of gradients of so many bytes that leave, how many are there at a time: what is made, beside what is on its way.
    pub fn window(&self, bytes: u64) -> u64 {
        let largest = self.prepared.lives.gradients().map(|(class, result)| self.sizes()[class][result]).max();
        (2 * bytes / self.blocks.max(1)).max(largest.unwrap_or(0))
    }
}
