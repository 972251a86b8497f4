//! What a source's words for its precision, ZeRO stage and recomputation mean.

use super::block::Again;
use super::pipeline::Schedule;

/// Whether products run in 8 bits, by what the source calls its precision.
///
/// # Errors
/// Names a precision that is none of them.
pub fn is_f8(precision: &str) -> Result<bool, String> {
    let words = precision.to_lowercase();
    let has = |names: &[&str]| names.iter().any(|name| words.contains(name));
    match (has(&["fp8", "float8"]), has(&["bf16", "bfloat16", "fp16", "float16"])) {
        (true, _) if !words.contains("mx") => Ok(true),
        (false, true) => Ok(false),
        _ if words == "half" => Ok(false),
        _ => Err(format!("precision `{precision}` is not bf16, fp16 or fp8")),
    }
}

/// The ZeRO stage, as a number or in words.
///
/// # Errors
/// State on the host, a stage with something else, and what is no stage.
pub fn zero_stage(value: &serde_json::Value) -> Result<u64, String> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_lowercase);
    if ["offload", "infinity", "cpu", "nvme"].iter().any(|word| text.contains(word)) {
        return Err(format!("ZeRO `{text}` moves state to the host"));
    }
    if text.contains('+') {
        return Err(format!("ZeRO `{text}` is a stage and something more, which is not known"));
    }
    // What stands in brackets says no more.
    let text = text.split('(').next().unwrap_or_default().trim();
    let is_figure = |letter: char| letter.is_ascii_digit() || letter == '.';
    let last = || text.rsplit(|letter| !is_figure(letter)).next()?.parse().ok();
    let number = match text {
        "none" | "no" | "ddp" => Some(0.0),
        // Fully sharded data parallelism divides all that stage 3 does.
        "fsdp" | "fsdp2" => Some(3.0),
        "distributed optimizer" => Some(1.0),
        _ if value.is_string() => last(),
        _ => value.as_f64(),
    };
    let stage = number.filter(|stage| [0.0, 1.0, 2.0, 3.0].contains(stage));
    stage.map(|stage| stage as u64).ok_or_else(|| format!("ZeRO `{text}` is not a stage from 0 to 3"))
}

/// How a source's words say what is computed again.
///
/// # Errors
/// Words that are not known.
pub fn recomputation(text: &str) -> Result<Again, String> {
    match text {
        "none" | "no" | "false" => Ok(Again::Nothing),
        "selective-op" => Ok(Again::Operations),
        "selective-layer" => Ok(Again::HalfTheLayers),
        _ if text == "true" || text.starts_with("full") => Ok(Again::Everything),
        _ if text.starts_with("selective") => Ok(Again::Attention),
        _ => Err(format!("recomputation `{text}` is not known")),
    }
}

/// The pipeline's schedule, where the words of a source name one that is not 1F1B, as it is or interleaved.
pub fn schedule(notes: &str) -> Option<Schedule> {
    let notes = notes.to_lowercase();
    let has = |names: &[&str]| names.iter().any(|name| notes.contains(name));
    match () {
        () if has(&["zbv", "zb-v", "zero-bubble v", "zero bubble v"]) => Some(Schedule::ZeroBubbleV),
        () if has(&["zb-h", "zb1p", "zero-bubble", "zero bubble"]) => Some(Schedule::ZeroBubble),
        () if has(&["gpipe"]) => Some(Schedule::GPipe),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_are_read() {
        assert_eq!(["BF16", "fp16", "FP8 (rowwise)", "fp8-delayed"].map(is_f8), [false, false, true, true].map(Ok));
        assert!(["fp32", "", "mxfp8", "int8", "nvfp4", "tf32"].iter().all(|text| is_f8(text).is_err()));
        let stages = [json!(1), json!(3.0), json!("zero1"), json!("ZeRO-2"), json!("stage 3")].map(|v| zero_stage(&v));
        assert_eq!(stages, [1, 3, 1, 2, 3].map(Ok));
        assert_eq!([json!("3.0"), json!("stage 2.0 "), json!("1")].map(|v| zero_stage(&v)), [3, 2, 1].map(Ok));
        let words =
            ["none", "FSDP", "ZeRO-3 (FSDP)", "distributed optimizer", "DDP"].map(|text| zero_stage(&json!(text)));
        assert_eq!(words, [0, 3, 3, 1, 0].map(Ok));
        let refused = [
            (json!(9), "`9` is not a stage"),
            (json!(-1), "`-1` is not a stage"),
            (json!(true), "`true` is not a stage"),
            (json!("hsdp"), "`hsdp` is not a stage"),
            (json!("1.5"), "`1.5` is not a stage"),
            (json!("3.0.1"), "`3.0.1` is not a stage"),
            (json!("3+offload"), "moves state to the host"),
            (json!("2+hsdp"), "`2+hsdp` is a stage and something more"),
        ];
        for (value, expect) in refused {
            let message = zero_stage(&value).unwrap_err();
            assert!(message.contains(expect), "{message}");
        }
        assert_eq!(recomputation("full-uniform"), Ok(Again::Everything));
        assert_eq!(recomputation("selective+seqpar"), Ok(Again::Attention));
        assert!(recomputation("some").is_err());
        let schedules = ["PP (ZBV)", "zero bubble, ZB-H1", "GPipe", "1F1B; interleaved"].map(schedule);
        let named = [Schedule::ZeroBubbleV, Schedule::ZeroBubble, Schedule::GPipe].map(Some);
        assert_eq!(schedules, [named[0], named[1], named[2], None]);
    }
}
