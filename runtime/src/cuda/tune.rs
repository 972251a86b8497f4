//! The fastest algorithm for everything of a program that a library offers several for, measured: matrix products
//! ([`products`]) and convolutions ([`convolutions`]).
//!
//! A library orders its algorithms by a model of the device. Here the first few of that order are run on
//! the device, on the program's own addresses and with noise in the operands (a product of zeros draws little power, and
//! is faster than any other), before the program's first step. What the library proposes for others of the program
//! ([`gemm::Configuration`], [`cudnn::Configuration`]) is tried as well: what was fast for those comes first, and trying ends
//! where some in a row were no faster. Long sums of small products are also split into other numbers of parts than the
//! library thinks of. Before an algorithm takes the place of the library's first choice, its result is compared with that
//! one's, on equal memory: the library checks layouts alone.
//!
//! **Runs.** What is found is kept on disk per GPU, driver and version of the library, so that a later run measures
//! nothing and computes the same bits. Of runs at once that measure the same the first one's choice is kept,
//! and the others compute with it too.
//!
//! **Ranks.** Two algorithms may add in two orders. Ranks that compute the same value must get the same
//! bits, so one rank measures, the run's first, and the others take its choices; what it does not compute, the first
//! rank measures that does ([`Tuning`]). Ranks with another GPU, driver or library than the first take none. Whether
//! anything is measured the first rank says ([`SWITCH`]).

mod bench;
pub mod convolutions;
pub mod products;
mod search;

use super::cache::Cache;
use super::cudnn;
use super::device::{Device, Failure};
use super::executor::OTHER_FAILED;
use super::gather::gather;
use super::gemm;
use crate::launch::World;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The variable that, set to `0` for the run's first rank, leaves everything to the libraries' first choices, on all.
const SWITCH: &str = "SHARDC_TUNE";

/// What was measured of one product or convolution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Choice<A> {
    algorithm: A,
    microseconds: f64,
    /// With the library's first choice.
    first_microseconds: f64,
}

/// The chosen algorithms, by the keys of what they compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choices<A>(BTreeMap<String, Choice<A>>);

impl<A> Default for Choices<A> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// An algorithm that can be kept and told.
pub trait Kept: Clone + Serialize + DeserializeOwned {}

impl<A: Clone + Serialize + DeserializeOwned> Kept for A {}

impl<A: Kept> Choices<A> {
    /// The algorithm for what has this key, if it was measured.
    pub fn get(&self, key: &str) -> Option<&A> {
        self.0.get(key).map(|choice| &choice.algorithm)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The keys that are not among these.
    fn lacks(&self, keys: &BTreeSet<String>) -> BTreeSet<String> {
        keys.iter().filter(|key| !self.0.contains_key(*key)).cloned().collect()
    }
}

/// What the run's first rank tells the others.
#[derive(Debug, Serialize, Deserialize)]
struct Told<A> {
    /// The file of its device; empty where nothing is measured.
    file: String,
    choices: Choices<A>,
}

impl<A> Default for Told<A> {
    fn default() -> Self {
        Self { file: String::new(), choices: Choices::default() }
    }
}

/// The choices of all kinds that all ranks of a run make together.
pub struct Tunings {
    pub products: Tuning<gemm::Algorithm>,
    pub convolutions: Tuning<cudnn::Configuration>,
}

impl Tunings {
    /// For the ranks that this process drives, of which `lead` is the first. All processes call this in the same order.
    pub fn new(world: &Arc<World>, lead: u64) -> Self {
        Self {
            products: Tuning::new(world.clone(), "matmul", lead),
            convolutions: Tuning::new(world.clone(), "convolution", lead),
        }
    }

    /// Lets no rank of this process wait for a lead that could not start.
    pub fn give_up(&self) {
        self.products.give_up();
        self.convolutions.give_up();
    }
}

/// The choices of one kind. All ranks make those of every kind, in the same order, whether they have any to make or not.
pub struct Tuning<A> {
    world: Arc<World>,
    /// The kind.
    name: &'static str,
    /// The rank that chooses for this process.
    lead: u64,
    /// Whether anything is measured, as the run's first rank says.
    is_on: bool,
    /// The key under which the run's first rank puts its choices.
    key: String,
    cache: Cache,
    chosen: Mutex<Option<Result<Arc<Told<A>>, Failure>>>,
    done: Condvar,
}

impl<A: Kept> Tuning<A> {
    fn new(world: Arc<World>, name: &'static str, lead: u64) -> Self {
        let key = world.round(name);
        let (is_on, cache) = (std::env::var(SWITCH).as_deref() != Ok("0"), Cache::of_user());
        Self { world, name, lead, is_on, key, cache, chosen: Mutex::default(), done: Condvar::new() }
    }

    /// The choices for a rank's `keys` on the device of this file. Of each key one rank makes the choice: by
    /// `measure`, which adds those for some keys to the choices that it is given. Of several ranks in a process, the
    /// first one's are measured.
    pub fn choices(
        &self,
        rank: u64,
        file: &str,
        keys: &BTreeSet<String>,
        measure: impl FnMut(&mut Choices<A>, &BTreeSet<String>) -> Result<(), Failure>,
    ) -> Result<Arc<Choices<A>>, Failure> {
        let lock = || self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if rank == self.lead {
            let made = self.lead(file, keys, measure).map(Arc::new);
            *lock() = Some(made);
            self.done.notify_all();
        }
        let waited = self.done.wait_while(lock(), |chosen| chosen.is_none());
        let chosen = waited.unwrap_or_else(PoisonError::into_inner).clone();
        let told = chosen.unwrap_or_else(|| Ok(Arc::default()))?;
        if told.file == file || told.choices.0.is_empty() {
            return Ok(Arc::new(told.choices.clone()));
        }
        tracing::warn!(
            "rank {rank} computes by the library's first choices: it has {file}, and the first rank measured with {}",
            told.file
        );
        Ok(Arc::default())
    }

    fn give_up(&self) {
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        chosen.get_or_insert_with(|| Err(OTHER_FAILED.to_string()));
        self.done.notify_all();
    }

    fn lead(
        &self,
        file: &str,
        keys: &BTreeSet<String>,
        mut measure: impl FnMut(&mut Choices<A>, &BTreeSet<String>) -> Result<(), Failure>,
    ) -> Result<Told<A>, Failure> {
        self.world.at(format!("choosing algorithms ({})", self.name));
        let mut told = if self.world.is_lead() {
            let told = match self.is_on {
                true => Told { file: file.to_string(), choices: self.make(file, keys, &mut measure)? },
                false => Told::default(),
            };
            let bytes = serde_json::to_vec(&told).map_err(|error| error.to_string())?;
            self.world.set(&self.key, &bytes).map_err(|error| error.to_string())?;
            told
        } else {
            let bytes = self.world.get(&self.key, false).map_err(|error| error.to_string())?;
            serde_json::from_slice(&bytes).map_err(|error| format!("the first rank's choices: {error}"))?
        };
        if told.file.is_empty() {
            return Ok(told);
        }
        // What the first rank does not compute.
        let missing = if told.file == file { told.choices.lacks(keys) } else { BTreeSet::new() };
        let all = gather(&self.world, &format!("{} keys", self.name), &missing)?;
        if all.iter().all(BTreeSet::is_empty) {
            return Ok(told);
        }
        let is_theirs = |key: &String| all.iter().take(self.world.rank() as usize).any(|others| others.contains(key));
        let own = missing.into_iter().filter(|key| !is_theirs(key)).collect();
        let made = gather(&self.world, &format!("{} choices", self.name), &self.make(file, &own, &mut measure)?)?;
        told.choices.0.extend(made.into_iter().flat_map(|made| made.0));
        Ok(told)
    }

    /// The choices for some keys: those that are kept, and those that are measured, which are kept from now on.
    fn make(
        &self,
        file: &str,
        keys: &BTreeSet<String>,
        measure: &mut impl FnMut(&mut Choices<A>, &BTreeSet<String>) -> Result<(), Failure>,
    ) -> Result<Choices<A>, Failure> {
        let parse = |bytes: Option<Vec<u8>>| bytes.and_then(|bytes| Choices::from_bytes(&bytes)).unwrap_or_default();
        let mut choices = parse(self.cache.read(file));
        let missing = choices.lacks(keys);
        if !missing.is_empty() {
            measure(&mut choices, &missing)?;
            let kept = self.cache.update(file, |now| {
                // What another run chose meanwhile counts: repeating either computes the same bits.
                choices.0.extend(parse(now).0);
                choices.to_bytes()
            });
            if let Err(error) = kept {
                tracing::warn!(
                    "the choices of {file} are not kept, so that later runs may compute other bits: {error}"
                );
            }
        }
        choices.0.retain(|key, _| keys.contains(key));
        Ok(choices)
    }
}

/// The file in which choices for a device are kept that `library` offers. `method` is the version of this way of choosing:
/// what older ones chose is not read.
fn file(device: &Device, kind: &str, library: &str, method: u32) -> Result<String, Failure> {
    let (name, count, driver) = device.description()?;
    let word = |text: &str| text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect::<String>();
    Ok(format!("{kind}/{}-{count}-driver-{}-{library}-{method}.json", word(&name), word(&driver)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{Limits, Place, Server};

    fn choices(key: &str) -> Choices<gemm::Algorithm> {
        let choice = Choice { algorithm: [7; 8], microseconds: 3.0, first_microseconds: 4.0 };
        Choices([(key.to_string(), choice)].into())
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let all = choices("bf16[1,2]/1+0@256");
        assert_eq!(Choices::from_bytes(&all.to_bytes()), Some(all.clone()));
        assert_eq!(all.get("bf16[1,2]/1+0@256"), Some(&[7; 8]));
        assert_eq!(all.get("bf16[1,2]/1+0@128"), None);
        assert_eq!(Choices::<gemm::Algorithm>::from_bytes(b"{\"a\": 1}"), None);
    }

    fn folder(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("shardc-tune-{name}-{}", std::process::id()))
    }

    fn set(keys: &[&str]) -> BTreeSet<String> {
        keys.iter().map(|key| key.to_string()).collect()
    }

    /// The same algorithm for some products, with a mark of who measured it.
    fn measured(keys: &BTreeSet<String>, mark: u64) -> BTreeMap<String, Choice<gemm::Algorithm>> {
        let choice = Choice { algorithm: [mark; 8], microseconds: 3.0, first_microseconds: 4.0 };
        keys.iter().map(|key| (key.clone(), choice.clone())).collect()
    }

    #[test]
    fn the_first_rank_measures_and_the_others_take_its_choices() {
        let folder = folder("first");
        let tuning = || Tuning { cache: Cache::at(&folder), ..Tuning::new(Arc::new(World::alone()), "matmul", 4) };
        let run = |tuning: &Tuning<gemm::Algorithm>, file: &str| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| tuning.choices(5, file, &set(&["a"]), |_, _| panic!("measures as well")));
                let own = tuning.choices(4, "file", &set(&["a"]), |known, wanted| {
                    known.0.extend(measured(wanted, 7));
                    Ok(())
                });
                (own.unwrap(), other.join().unwrap().unwrap())
            })
        };
        let (own, other) = run(&tuning(), "file");
        assert_eq!((&*own, &*other), (&choices("a"), &choices("a")));
        // Of another library, what its numbers mean is not known.
        let (own, other) = run(&tuning(), "other file");
        assert_eq!((&*own, &*other), (&choices("a"), &Choices::default()));
        let kept = tuning().choices(4, "file", &set(&["a"]), |_, _| panic!("kept for later runs"));
        assert_eq!(kept.as_deref(), Ok(&choices("a")));
        let again = tuning().choices(4, "file", &set(&["a", "b"]), |known, wanted| {
            assert_eq!((&*known, wanted), (&choices("a"), &set(&["b"])));
            Err("no device".to_string())
        });
        assert_eq!(again, Err("no device".to_string()));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_run_adopts_what_another_kept_while_it_measured() {
        let folder = folder("runs");
        let tuning = || Tuning { cache: Cache::at(&folder), ..Tuning::new(Arc::new(World::alone()), "matmul", 0) };
        let run = |mark: u64, keys: &[&str], meanwhile: &dyn Fn()| {
            tuning().choices(0, "file", &set(keys), |known, wanted| {
                meanwhile();
                known.0.extend(measured(wanted, mark));
                Ok(())
            })
        };
        let expect = Choices([measured(&set(&["a"]), 1), measured(&set(&["b"]), 2)].into_iter().flatten().collect());
        let first = run(1, &["a", "b"], &|| drop(run(2, &["b", "c"], &|| ()).unwrap())).unwrap();
        assert_eq!(*first, expect);
        // Each repeated computes what it did.
        assert_eq!(run(3, &["a", "b"], &|| panic!("measures again")).unwrap(), first);
        let second = run(3, &["b", "c"], &|| panic!("measures again")).unwrap();
        assert_eq!(*second, Choices(measured(&set(&["b", "c"]), 2)));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    fn join(server: &Server, rank: u64, ranks: u64) -> Arc<World> {
        let place = Place { rank, ranks, address: server.address().to_string(), is_ours: true, ..Place::alone() };
        Arc::new(World::join(place, "GPU", Limits::default()).unwrap())
    }

    #[test]
    fn the_first_rank_says_whether_anything_is_measured() {
        let folders = [0, 1].map(|rank| folder(&format!("switch-{rank}")));
        let run = |server: &Server, rank: u64, is_on: bool| {
            let cache = Cache::at(&folders[rank as usize]);
            let tuning = Tuning { cache, is_on, ..Tuning::new(join(server, rank, 2), "matmul", rank) };
            let made = tuning.choices(rank, "file", &set(&["a", ["b", "c"][rank as usize]]), |known, wanted| {
                known.0.extend(measured(wanted, rank));
                Ok(())
            });
            made.unwrap()
        };
        for switches in [[true, true], [true, false], [false, true], [false, false]] {
            let server = Server::bind("127.0.0.1:0", 2, Limits::default()).unwrap();
            let all = std::thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| (rank, &server, switches[rank as usize]));
                let ranks = ranks.map(|(rank, server, is_on)| scope.spawn(move || run(server, rank, is_on)));
                ranks.map(|rank| rank.join().unwrap())
            });
            let expect = [measured(&set(&["a", "b"]), 0), measured(&set(&["c"]), 1)].into_iter().flatten();
            let expect = Choices(expect.filter(|_| switches[0]).collect());
            assert!(all.iter().all(|choices| **choices == expect), "{switches:?}: {all:?}");
        }
        folders.iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }

    #[test]
    fn what_the_first_rank_does_not_compute_another_measures() {
        let server = Server::bind("127.0.0.1:0", 3, Limits::default()).unwrap();
        let folders = [0, 1, 2].map(|rank| folder(&format!("rank-{rank}")));
        let run = |rank: u64, keys: &[&str]| {
            let world = join(&server, rank, 3);
            let cache = Cache::at(&folders[rank as usize]);
            let tuning = Tuning { cache, ..Tuning::new(world, "matmul", rank) };
            let made = tuning.choices(rank, "file", &set(keys), |known, wanted| {
                known.0.extend(measured(wanted, rank));
                Ok(())
            });
            made.unwrap()
        };
        let all = std::thread::scope(|scope| {
            let others = [(1, &["a", "b"]), (2, &["b", "c"])].map(|(rank, keys)| scope.spawn(move || run(rank, keys)));
            let first = run(0, &["a"]);
            let [second, third] = others.map(|other| other.join().unwrap());
            [first, second, third]
        });
        let expect = [("a", 0), ("b", 1), ("c", 2)].map(|(key, rank)| measured(&set(&[key]), rank));
        let expect = Choices(expect.into_iter().flatten().collect());
        assert!(all.iter().all(|choices| **choices == expect), "{all:?}");
        folders.iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }
}
