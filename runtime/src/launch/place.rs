//! Which rank this process is, as its launcher says.
//!
//! Launchers tell each process who it is by environment variables. They are looked for in this
//! order, because a job script of Slurm may itself run torchrun or mpirun:
//!
//! | launcher | rank, number of ranks | on this host | where rank 0 is |
//! |---|---|---|---|
//! | shardc, torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` | `MASTER_ADDR`, needed on several hosts |
//! | MPICH, Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID` | the same |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_LOCALID` | `MASTER_ADDR`, else the first of `SLURM_STEP_NODELIST` |
//!
//! The store listens on `MASTER_PORT`. Where torchrun's agent keeps a store of its own there
//! (`TORCHELASTIC_USE_AGENT_STORE`), ours takes the next port.

use super::LaunchError;

/// The port where nothing says another: torchrun's default.
const PORT: u16 = 29500;

/// Set by shardc's own launcher, which then serves the store itself.
pub(super) const LAUNCHER: &str = "SHARDC_LAUNCHER";

/// A process's place in the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: u64,
    /// The number of ranks.
    pub ranks: u64,
    /// The rank among those of its host: which device it takes.
    pub local_rank: u64,
    /// Where the store is: `HOST:PORT`.
    pub address: String,
    /// Whose variables were read.
    pub launcher: &'static str,
    /// Whether shardc's own launcher started it: that one serves the store, prefixes what ranks
    /// print, and has the last word.
    pub is_ours: bool,
}

/// Reads a variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Place {
    /// The only rank of a run.
    pub fn alone() -> Self {
        let address = String::new();
        Self { rank: 0, ranks: 1, local_rank: 0, address, launcher: "none", is_ours: false }
    }

    /// What this process's environment says; `None` if no launcher started it, or it is the only one.
    ///
    /// # Errors
    /// Variables that make no sense, named.
    pub fn from_env() -> Result<Option<Self>, LaunchError> {
        Self::read(&|name| std::env::var(name).ok())
    }

    fn read(lookup: Lookup<'_>) -> Result<Option<Self>, LaunchError> {
        let has = |names: &[&str]| names.iter().all(|name| lookup(name).is_some());
        let is_ours = lookup(LAUNCHER).is_some();
        let (launcher, [rank, ranks, local]) = if has(&["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]) {
            (if is_ours { "shardc" } else { "torchrun" }, ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
        } else if has(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) {
            ("Open MPI", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
        } else if has(&["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS"]) && !has(&["MPI_LOCALRANKID"]) {
            // Its `--mpi=pmi2` sets two of MPICH's variables as well.
            ("Slurm", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"])
        } else if has(&["PMI_RANK", "PMI_SIZE"]) {
            ("MPICH", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"])
        } else {
            return Ok(None);
        };
        let ranks_number = number(lookup, ranks)?;
        if ranks_number == 1 {
            return Ok(None);
        }
        let rank_number = number(lookup, rank)?;
        if rank_number >= ranks_number {
            let what = format!("it must be less than {ranks}, which is {ranks_number}");
            return Err(LaunchError::Variable { variable: rank, value: rank_number.to_string(), what });
        }
        let local_rank = number(lookup, local)?;
        let address = address(lookup, launcher, local, local_rank == rank_number)?;
        Ok(Some(Self { rank: rank_number, ranks: ranks_number, local_rank, address, launcher, is_ours }))
    }
}

fn number(lookup: Lookup<'_>, variable: &'static str) -> Result<u64, LaunchError> {
    let value = lookup(variable).unwrap_or_default();
    let wrong = |_| LaunchError::Variable { variable, value: value.clone(), what: "it must be a number".into() };
    value.parse().map_err(wrong)
}

/// Where the store is. `may_be_one_host` is false where a rank's local rank shows that there are several.
fn address(
    lookup: Lookup<'_>,
    launcher: &'static str,
    local: &'static str,
    may_be_one_host: bool,
) -> Result<String, LaunchError> {
    let slurm_host = || lookup("SLURM_STEP_NODELIST").filter(|_| launcher == "Slurm");
    let host = match (lookup("MASTER_ADDR"), slurm_host()) {
        (Some(host), _) => host,
        (None, Some(list)) => first_host(&list),
        (None, None) if may_be_one_host => "127.0.0.1".to_string(),
        (None, None) => {
            let what = format!("{launcher} says by {local} that there are several hosts, but not where rank 0 is");
            return Err(LaunchError::Variable { variable: "MASTER_ADDR", value: String::new(), what });
        }
    };
    let port = match (lookup("MASTER_PORT"), lookup("SLURM_JOB_ID").filter(|_| launcher == "Slurm")) {
        (Some(value), _) => {
            let wrong =
                |_| LaunchError::Variable { variable: "MASTER_PORT", value: value.clone(), what: "no port".into() };
            value.parse().map_err(wrong)?
        }
        // Jobs that share a host take different ports.
        (None, Some(job)) => 61440 + (job.parse::<u64>().unwrap_or(0) % 4096) as u16,
        (None, None) => PORT,
    };
    let taken = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let port = if taken { port.wrapping_add(1) } else { port };
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
    Ok(format!("{host}:{port}"))
}

/// The first host of Slurm's notation: `node[03-07,09],other` is `node03`.
fn first_host(list: &str) -> String {
    let mut host = String::new();
    let mut letters = list.chars();
    while let Some(letter) = letters.next().filter(|letter| *letter != ',') {
        if letter != '[' {
            host.push(letter);
            continue;
        }
        let inside: String = letters.by_ref().take_while(|letter| *letter != ']').collect();
        host.push_str(inside.split(['-', ',']).next().unwrap_or_default());
    }
    host
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Place>, String> {
        let lookup = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| v.to_string());
        Place::read(&lookup).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn check(variables: &[(&str, &str)], rank: u64, ranks: u64, local: u64, address: &str, launcher: &str) {
        let place = read(variables).unwrap().unwrap();
        let found = (place.rank, place.ranks, place.local_rank, place.address.as_str(), place.launcher);
        assert_eq!(found, (rank, ranks, local, address, launcher));
    }

    #[test]
    fn launchers() {
        let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node0")];
        check(&torchrun, 5, 8, 1, "node0:29500", "torchrun");
        let agent = [("MASTER_PORT", "1234"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
        check(&[&torchrun[..], &agent].concat(), 5, 8, 1, "node0:1235", "torchrun");
        check(&[&torchrun[..], &[("SHARDC_LAUNCHER", "1")]].concat(), 5, 8, 1, "node0:29500", "shardc");
        let mpi = |rank| {
            [
                ("OMPI_COMM_WORLD_RANK", rank),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                ("SLURM_PROCID", "9"),
            ]
        };
        check(&mpi("1"), 1, 4, 1, "127.0.0.1:29500", "Open MPI");
        let several = [&mpi("3")[..], &[("MASTER_ADDR", "fe80::1")]].concat();
        check(&several, 3, 4, 1, "[fe80::1]:29500", "Open MPI");
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_STEP_NODELIST", "gpu-[007-008,011]"),
            ("SLURM_JOB_ID", "4097"),
        ];
        check(&slurm, 3, 16, 3, "gpu-007:61441", "Slurm");
    }

    #[test]
    fn no_launcher() {
        assert_eq!(read(&[]), Ok(None));
        // A pod of Kubernetes has a rank, but no rank on its host; a job script of Slurm has no step.
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")]), Ok(None));
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]), Ok(None));
        let one = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "a")];
        assert_eq!(read(&one), Ok(None));
    }

    #[test]
    fn nonsense_is_named() {
        let with = |rank, ranks| [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "a")];
        let error = |variables: &[(&str, &str)]| read(variables).unwrap_err();
        assert_eq!(error(&with("x", "2")), "the environment variable RANK is `x`: it must be a number");
        let text = "the environment variable RANK is `2`: it must be less than WORLD_SIZE, which is 2";
        assert_eq!(error(&with("2", "2")), text);
        let lost = [("PMI_RANK", "9"), ("PMI_SIZE", "16"), ("MPI_LOCALRANKID", "1")];
        assert!(error(&lost).contains("MASTER_ADDR"), "{}", error(&lost));
    }

    #[test]
    fn hosts() {
        let check = |list: &str, expect: &str| assert_eq!(first_host(list), expect);
        check("a1,a2", "a1");
        check("node[03-07,09],b", "node03");
        check("a,node[1-2]", "a");
        check("r[1-2]n[3,4],x", "r1n3");
    }
}
