//! Operations with another attribute, whichever they have.

use super::change_list;
use serde_json::Value;
use shardc_passes::random::Random;

/// Attributes that stand in the text only where they are not the usual ones.
fn unusual() -> [(&'static str, Value); 11] {
    [
        ("start", 1.into()),
        ("causal", true.into()),
        ("lead", 1.into()),
        ("classes", 5.into()),
        ("bias", true.into()),
        ("epilogue", "gelu_tanh".into()),
        ("epilogue", "gelu_tanh_grad".into()),
        ("deterministic", true.into()),
        ("cast", "bf16".into()),
        ("groups", 2.into()),
        ("inverse", true.into()),
    ]
}

/// Changes one thing somewhere in a value.
pub fn change_value(value: &mut Value, random: &mut Random) -> Option<()> {
    let mut pointers = Vec::new();
    list_pointers(value, String::new(), &mut pointers);
    let target = value.pointer_mut(random.choose(&pointers)?)?;
    *target = match target {
        Value::Bool(value) => (!*value).into(),
        Value::String(text) => change_text(text, random)?.into(),
        Value::Number(number) => change_number(number, random)?,
        Value::Array(list) => {
            change_list(list, random)?;
            return Some(());
        }
        Value::Object(map) => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let extra = random.choose(&unusual())?.clone();
            match random.choose(&keys).filter(|_| random.below(3) == 0) {
                Some(key) => drop(map.remove(key)),
                None => drop(map.insert(extra.0.to_string(), extra.1)),
            }
            return Some(());
        }
        Value::Null => return None,
    };
    Some(())
}

fn list_pointers(value: &Value, at: String, into: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| list_pointers(value, format!("{at}/{key}"), into)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(index, value)| list_pointers(value, format!("{at}/{index}"), into));
        }
        _ => {}
    }
    into.push(at);
}

fn change_number(number: &serde_json::Number, random: &mut Random) -> Option<Value> {
    Some(match (number.as_i64(), random.below(4)) {
        (Some(number), 0) => (number + 1).into(),
        (Some(number), 1) => (number - 1).into(),
        (Some(number), 2) => (2 * number).into(),
        (Some(_), _) => random.below(8).into(),
        (None, 0) => (0.25 - number.as_f64()?).into(),
        (None, 1) => (2.0 * number.as_f64()? + 1.0).into(),
        (None, 2) => (number.as_f64()? + 0.5).into(),
        (None, _) => 0.0.into(),
    })
}

/// A notation with two letters exchanged, or the name of something else.
fn change_text(text: &str, random: &mut Random) -> Option<String> {
    if text.contains("->") {
        let mut letters: Vec<char> = text.chars().collect();
        let (a, b) = (random.below(letters.len()), random.below(letters.len()));
        letters.swap(a, b);
        return Some(letters.into_iter().collect());
    }
    let names = ["add", "sub", "mul", "max", "min", "exp", "log", "neg", "sum", "gelu", "silu", "relu", "f32", "bf16"];
    random.choose(&names).map(ToString::to_string)
}
