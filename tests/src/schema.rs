//! As much of JSON Schema (draft 2020-12) as the published schema of plans uses.
//!
//! A keyword that is not known here is a finding of its own, so that a schema that says more than is
//! checked cannot pass.

use serde_json::Value;

/// Everything in `value` that the schema does not allow, each with its place.
pub fn violations(value: &Value, schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(value, schema, "plan", &mut found);
    found
}

fn check(value: &Value, schema: &Value, at: &str, found: &mut Vec<String>) {
    let Some(keywords) = schema.as_object() else {
        return found.push(format!("{at}: its schema is no object"));
    };
    for (keyword, rule) in keywords {
        let holds = match keyword.as_str() {
            "$schema" | "title" | "description" => true,
            "type" => is_of(value, rule.as_str().unwrap_or_default()),
            "const" => value == rule,
            "enum" => rule.as_array().is_some_and(|allowed| allowed.contains(value)),
            "minimum" => value.as_f64().zip(rule.as_f64()).is_none_or(|(value, least)| value >= least),
            "pattern" => value.as_str().is_none_or(|text| is_digits(text, rule.as_str().unwrap_or_default())),
            "required" => {
                let missing = |key: &&Value| value.get(key.as_str().unwrap_or_default()).is_none();
                let missing = rule.as_array().into_iter().flatten().find(missing);
                missing.iter().for_each(|key| found.push(format!("{at}: {key} is missing")));
                true
            }
            "properties" => {
                for (key, inner) in rule.as_object().into_iter().flatten() {
                    if let Some(part) = value.get(key) {
                        check(part, inner, &format!("{at}.{key}"), found);
                    }
                }
                true
            }
            "additionalProperties" => {
                let known = |key: &String| schema["properties"].get(key).is_some();
                let extra = value.as_object().into_iter().flatten().find(|(key, _)| !known(key));
                extra.iter().for_each(|(key, _)| found.push(format!("{at}: `{key}` is not in the schema")));
                *rule == Value::Bool(false)
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    check(item, rule, &format!("{at}[{index}]"), found);
                }
                true
            }
            unknown => return found.push(format!("{at}: the schema says `{unknown}`, which is not checked")),
        };
        if !holds {
            found.push(format!("{at}: {value} breaks {keyword} {rule}"));
        }
    }
}

fn is_of(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => false,
    }
}

/// `^[0-9a-f]{N}$`, the one pattern of the schema.
fn is_digits(text: &str, pattern: &str) -> bool {
    let count = pattern.strip_prefix("^[0-9a-f]{").and_then(|rest| rest.strip_suffix("}$"));
    let count: Option<usize> = count.and_then(|count| count.parse().ok());
    count == Some(text.len()) && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}
