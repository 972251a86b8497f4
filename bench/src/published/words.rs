//! What a source's words for its precision, ZeRO stage and recomputation mean.

use super::block::Again;

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
        _ => Err(format!("precision `{precision}` is not bf16, fp16 or fp8")),
    }
}

/// The ZeRO stage, as a number or in words.
///
/// # Errors
/// State on the host, and what is no stage.
pub fn zero_stage(value: &serde_json::Value) -> Result<u64, String> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_lowercase);
    if ["offload", "infinity", "cpu", "nvme", "+"].iter().any(|word| text.contains(word)) {
        return Err(format!("ZeRO `{text}` moves state to the host"));
    }
    let digits = || text.trim_end().rsplit(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok();
    let number = if value.is_string() { digits() } else { value.as_f64() };
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_are_read() {
        assert_eq!(["BF16", "fp16", "FP8 (rowwise)", "fp8-delayed"].map(is_f8), [false, false, true, true].map(Ok));
        assert!(["fp32", "", "mxfp8", "int8"].iter().all(|text| is_f8(text).is_err()));
        let stages = [json!(1), json!(3.0), json!("zero1"), json!("ZeRO-2"), json!("stage 3")].map(|v| zero_stage(&v));
        assert_eq!(stages, [1, 3, 1, 2, 3].map(Ok));
        let refused = [json!(9), json!(-1), json!(true), json!("3+offload"), json!("hsdp")];
        assert!(refused.iter().all(|value| zero_stage(value).is_err()));
        assert_eq!(recomputation("full-uniform"), Ok(Again::Everything));
        assert_eq!(recomputation("selective+seqpar"), Ok(Again::Attention));
        assert!(recomputation("some").is_err());
    }
}
