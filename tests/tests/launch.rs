//! Runs of several real processes: they meet, and when one is killed, hangs or fails, all others end
//! in time and the message names it.
//!
//! The ranks are this test program again, restricted to the test `rank`, which does what the
//! variable `ROLE` says.

use shardc_runtime::launch::{Failure, LaunchError, Launcher, Limits, Place, World};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const ROLE: &str = "SHARDC_TEST_ROLE";
const DIR: &str = "SHARDC_TEST_DIR";

fn limits() -> Limits {
    Limits {
        join: Duration::from_secs(30),
        notice: Duration::from_secs(20),
        wait: Duration::from_secs(60),
        beat: Duration::from_millis(50),
        silence: Duration::from_secs(4),
        grace: Duration::from_secs(2),
        force: Duration::from_secs(1),
        step: Duration::from_secs(60),
    }
}

fn arguments() -> Vec<OsString> {
    ["--exact", "rank", "--nocapture", "--test-threads=1"].map(OsString::from).to_vec()
}

/// Runs ranks under the launcher of one host. What each rank says in the end lies in files `RANK` of
/// the folder.
fn launch(role: &str, ranks: u64, dir: &Path, stop: &AtomicBool) -> Result<(), LaunchError> {
    let launcher = Launcher::new(ranks, "GPU", limits()).unwrap();
    launcher.set("role", role.as_bytes());
    launcher.set("dir", dir.to_str().unwrap().as_bytes());
    launcher.run(&std::env::current_exe().unwrap(), &arguments(), stop)
}

/// A run that must fail: the failure, where the others were, what the ranks said, and how long it took.
fn failing(role: &str) -> (Failure, Vec<(u64, String)>, Vec<String>, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let error = launch(role, 3, dir.path(), &AtomicBool::new(false)).unwrap_err();
    let LaunchError::Ended { failure, others } = error else { panic!("{error}") };
    let said = (0..3).map(|rank| fs::read_to_string(dir.path().join(rank.to_string())).unwrap_or_default());
    (*failure, others, said.collect(), start.elapsed())
}

/// Sends this process a signal.
fn signal_self(signal: &str) {
    let kill = format!("kill -{signal} {}", std::process::id());
    Command::new("sh").args(["-c", &kill]).status().unwrap();
}

/// What a rank does; not a test where no launcher started this process.
#[test]
fn rank() {
    let Some(place) = Place::from_env().unwrap() else { return };
    let number = place.rank;
    let world = World::join(place, &format!("GPU {number}"), limits()).unwrap();
    let text = |key: &str| String::from_utf8(world.get(key, false).unwrap()).unwrap();
    let (role, dir) = match std::env::var(ROLE) {
        Ok(role) => (role, PathBuf::from(std::env::var(DIR).unwrap())),
        Err(_) => (text("role"), PathBuf::from(text("dir"))),
    };
    fs::write(dir.join(format!("pid{number}")), std::process::id().to_string()).unwrap();
    let outcome = steps(&world, &role);
    let said = outcome.as_ref().map_or_else(ToString::to_string, |steps| format!("{steps} steps"));
    fs::write(dir.join(number.to_string()), said).unwrap();
    drop(world);
    std::process::exit(i32::from(outcome.is_err()));
}

/// Steps with one meeting each, which is the collective; in the fourth, something happens to rank 1.
fn steps(world: &World, role: &str) -> Result<u64, LaunchError> {
    let mut step = 0;
    while step < 6 || matches!(role, "endless" | "launched") {
        world.at(format!("step {step}"));
        if role == "unequal" {
            world.agree(&[("plan's hash", format!("{:x}", 0xa0 + world.rank()))])?;
        }
        if step == 3 && world.rank() == 1 {
            // So that the others hear where it is.
            std::thread::sleep(limits().beat * 5);
            match role {
                "killed" | "outer killed" => signal_self("KILL"),
                "stopped" => signal_self("STOP"),
                "exits" => std::process::exit(7),
                "panics" => panic!("on purpose"),
                "fails" => {
                    world.fail("no memory is left", Some("take less".into()), 3);
                    std::process::exit(3);
                }
                _ => {}
            }
        }
        if role == "outer lead killed" && step == 3 && world.is_lead() {
            std::thread::sleep(limits().beat * 5);
            signal_self("KILL");
        }
        if role == "exits" && step == 3 && world.rank() == 2 {
            // Stuck in a device's library: only its heartbeat can end it.
            std::thread::sleep(Duration::from_secs(600));
        }
        let all = world.gather("step", &[step as u8, world.rank() as u8])?;
        let expect: Vec<Vec<u8>> = (0..world.ranks()).map(|rank| vec![step as u8, rank as u8]).collect();
        assert_eq!(all, expect);
        step += 1;
        if world.any("stop", world.is_asked_to_stop())? {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(step)
}

#[test]
fn ranks_meet_and_end() {
    let dir = tempfile::tempdir().unwrap();
    launch("well", 3, dir.path(), &AtomicBool::new(false)).unwrap();
    for rank in 0..3 {
        assert_eq!(fs::read_to_string(dir.path().join(rank.to_string())).unwrap(), "6 steps");
    }
}

#[test]
fn a_killed_rank_is_named_and_ends_the_others() {
    let (failure, others, said, took) = failing("killed");
    let text = failure.to_string();
    assert!(text.starts_with("rank 1 (GPU 1, pid "), "{text}");
    assert!(text.ends_with(", at step 3: it was killed by signal 9, SIGKILL"), "{text}");
    assert_eq!(others, [(0, "step 3".to_string()), (2, "step 3".to_string())]);
    for said in [&said[0], &said[2]] {
        assert!(said.starts_with("rank 1 (GPU 1, pid ") && said.contains("at step 3: it is gone"), "{said}");
    }
    assert!(took < limits().longest_end() + Duration::from_secs(15), "{took:?}");
}

#[test]
fn a_stopped_rank_is_named_and_ended() {
    let (failure, _, said, took) = failing("stopped");
    let text = failure.to_string();
    assert!(text.contains("rank 1") && text.contains("at step 3: not heard of for 4 s"), "{text}");
    assert!(said[0].contains("rank 1") && said[2].contains("rank 1"), "{said:?}");
    assert!(took < limits().longest_end() + Duration::from_secs(15), "{took:?}");
}

#[test]
fn an_exit_code_is_told_and_a_stuck_rank_ended() {
    let (failure, _, said, took) = failing("exits");
    assert_eq!((failure.rank, failure.message.as_str()), (1, "it ended with exit code 7"));
    assert_eq!(failure.code, 7);
    assert!(said[0].contains("rank 1"), "{said:?}");
    assert!(took < limits().longest_end() + Duration::from_secs(15), "{took:?}");
}

#[test]
fn a_panic_is_told() {
    let (failure, ..) = failing("panics");
    assert_eq!((failure.rank, failure.message.as_str()), (1, "it panicked"));
}

#[test]
fn a_rank_says_itself_why_it_fails() {
    let (failure, ..) = failing("fails");
    let found = (failure.rank, failure.at.as_str(), failure.message.as_str(), failure.code);
    assert_eq!(found, (1, "step 3", "no memory is left", 3));
    assert_eq!(failure.fix.as_deref(), Some("take less"));
}

#[test]
fn ranks_that_disagree_are_named() {
    let (_, _, said, _) = failing("unequal");
    let expect = "the ranks disagree on the plan's hash: rank 0 has a0, rank 1 has a1";
    assert!(said.iter().all(|said| said == expect || said.contains("it is gone") || said.is_empty()), "{said:?}");
    assert!(said.iter().any(|said| said == expect), "{said:?}");
}

#[test]
fn all_ranks_stop_at_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_for(|| dir.path().join("pid0").exists());
            std::thread::sleep(Duration::from_millis(300));
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        launch("endless", 3, dir.path(), &stop).unwrap();
    });
    let said = |rank: u64| fs::read_to_string(dir.path().join(rank.to_string())).unwrap();
    assert!(said(0).ends_with("steps"), "{}", said(0));
    assert_eq!((said(0), said(0)), (said(1), said(2)));
}

/// The process that starts ranks, to be killed; not a test where nothing asks for it.
#[test]
fn launcher() {
    if std::env::var(ROLE).as_deref() == Ok("launcher") {
        let dir = PathBuf::from(std::env::var(DIR).unwrap());
        let launcher = Launcher::new(2, "GPU", limits()).unwrap();
        // The ranks find their role by the store, not by what they inherit.
        launcher.set("role", b"launched");
        launcher.set("dir", dir.to_str().unwrap().as_bytes());
        let script = format!("unset {ROLE} {DIR}; exec \"$0\" \"$@\"");
        let mut all = vec![OsString::from("-c"), script.into(), std::env::current_exe().unwrap().into()];
        all.extend(arguments());
        let _ = launcher.run(Path::new("/bin/sh"), &all, &AtomicBool::new(false));
    }
}

#[test]
fn ranks_end_with_their_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "launcher", "--nocapture"]).env(ROLE, "launcher").env(DIR, dir.path());
    let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = |rank: u64| fs::read_to_string(dir.path().join(format!("pid{rank}"))).ok()?.parse::<u64>().ok();
    wait_for(|| pid(0).is_some() && pid(1).is_some());
    let is_alive = |rank| Path::new(&format!("/proc/{}", pid(rank).unwrap())).exists();
    assert!(is_alive(0) && is_alive(1));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    wait_for(|| !is_alive(0) && !is_alive(1));
}

/// Waits for what must come; a minute is far more than it takes.
#[track_caller]
fn wait_for(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "it did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Two ranks started by hand, as another launcher would.
fn outer(role: &str) -> (Vec<Option<i32>>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: u64| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let variables = [("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string()), ("WORLD_SIZE", "2".into())];
        command.args(arguments()).envs(variables).env("MASTER_ADDR", "localhost");
        command.env("MASTER_PORT", port.to_string()).env(ROLE, role).env(DIR, dir.path());
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    // The rank that serves the store comes last.
    let mut ranks = [start(1), start(0)];
    let codes = ranks.iter_mut().rev().map(|rank| rank.wait().unwrap().code()).collect();
    let said = (0..2).map(|rank| fs::read_to_string(dir.path().join(rank.to_string())).unwrap_or_default());
    (codes, said.collect())
}

#[test]
fn ranks_of_another_launcher() {
    let (codes, said) = outer("well");
    assert_eq!((codes, said), (vec![Some(0); 2], vec!["6 steps".to_string(); 2]));
    let (codes, said) = outer("outer killed");
    assert_eq!(codes, [Some(1), None]);
    assert!(said[0].starts_with("rank 1 (GPU 1, pid ") && said[0].contains("at step 3: it is gone"), "{said:?}");
    let (codes, said) = outer("outer lead killed");
    assert_eq!(codes, [None, Some(1)]);
    assert!(said[1].starts_with("rank 0 (serving the store at localhost:"), "{said:?}");
}
