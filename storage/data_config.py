"""The configuration of prompt data: what a recipe or a form says about where prompts come from."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataConfig(BaseModel):
    """Which prompts to train or evaluate on: files (`path`) or a generated task (`task`)."""

    model_config = ConfigDict(extra="forbid", title="Prompts")

    path: str | None = Field(
        default=None,
        title="Files",
        description="A JSON, JSON lines or Parquet file, a folder of them, or a glob; local or s3://",
    )
    task: str | None = Field(
        default=None,
        title="Generated task",
        description="reasoning_gym:<dataset>, or module:function called as function(index, seed, **task_options) "
        "and returning a row",
    )
    task_options: dict[str, int | float | str | bool] = Field(
        default={}, title="Task options", description="Passed to the generated task by name"
    )
    prompt_column: str = Field(
        default="prompt",
        title="Prompt column",
        description="Holds a string or a list of {role, content}; a.b reaches into a nested column",
    )
    answer_column: str | None = Field(
        default="answer",
        title="Answer column",
        description="Holds what the reward compares with; a.b reaches into a nested column; empty: none",
    )
    size: int | None = Field(
        default=None,
        ge=1,
        title="Number of prompts",
        description="Of a file: at most so many, from its start. Of a generated task: so many, repeated in epochs; "
        "empty: without end",
    )
    seed: int = Field(default=0, title="Seed of a generated task", description="Other seeds give other prompts")
    system_prompt: str | None = Field(
        default=None, title="System prompt", description="Put before every conversation that has none of its own"
    )
    overlong: Literal["error", "drop"] = Field(
        default="error", title="Prompts that are too long", description="Stop with an error, or leave them out"
    )

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        if (self.path is None) == (self.task is None):
            raise ValueError("give either path (files) or task (generated prompts), and not both")
        if self.path is not None and self.task_options:
            raise ValueError("task_options belong to a task; remove them, or give a task instead of a path")
        return self
