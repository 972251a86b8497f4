//! Memory over the time of a step: what each byte of a rank is for, when.

use shardc_ir::Program;
use shardc_ir::plan::Memory;
use shardc_passes::simulate::RunSpan;

/// What a rank's device memory holds from a moment on, in seconds since a run began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    /// The moment.
    pub at: f64,
    /// What it holds.
    pub memory: Memory,
}

/// The memory over one run, in seconds since it began, given that over the program
/// ([`memory_over_time`](shardc_passes::allocate::memory_over_time)). Equal runs of a section hold the same.
pub fn of_run(program: &Program, curve: &[(usize, Memory)], run: &RunSpan) -> Vec<Moment> {
    let earlier = program.sections.iter().take_while(|(section, _)| *section < run.run.section);
    let first: usize = earlier.map(|(_, section)| section.instructions.len()).sum();
    let begins = begins(program, run);
    let from = curve.partition_point(|(at, _)| *at < first);
    let to = curve.partition_point(|(at, _)| *at < first + begins.len());
    // What is held when the run begins, unless its first instruction changes it.
    let before = from.checked_sub(1).map(|index| (first, curve[index].1));
    let moments = before.into_iter().chain(curve[from..to].iter().copied());
    moments.map(|(at, memory)| Moment { at: begins[at - first], memory }).collect()
}

/// Of the moments that fall into the same one of the intervals of `width` seconds, the fullest and the last.
pub fn thin(moments: Vec<Moment>, width: f64) -> Vec<Moment> {
    let width = width.max(f64::MIN_POSITIVE);
    let mut kept: Vec<(u64, Moment, Moment)> = Vec::new();
    for moment in moments {
        let place = (moment.at / width) as u64;
        match kept.last_mut() {
            Some((other, fullest, last)) if *other == place => {
                if moment.memory.total() > fullest.memory.total() {
                    *fullest = moment;
                }
                *last = moment;
            }
            _ => kept.push((place, moment, moment)),
        }
    }
    let both = |(_, fullest, last): (u64, Moment, Moment)| {
        let next = (fullest.at < last.at).then_some(last);
        std::iter::once(fullest).chain(next)
    };
    kept.into_iter().flat_map(both).collect()
}

/// Per instruction of a run, when it begins or, if it takes no time, when what was issued before it does.
fn begins(program: &Program, run: &RunSpan) -> Vec<f64> {
    let mut begins = vec![0.0; program.sections[run.run.section].instructions.len()];
    for span in run.spans.iter() {
        begins[span.index as usize] = span.start;
    }
    // Issue order is the order of the allocator's time, and streams run ahead of each other.
    for index in 1..begins.len() {
        begins[index] = begins[index].max(begins[index - 1]);
    }
    begins
}
